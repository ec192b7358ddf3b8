"""The state from which each running request is about to make its next token, taken as a step goes by.

vLLM hands the last layer's output, after the final norm and only of the positions to be sampled, to the
model's LogitsProcessor; a torch forward hook on that module sees it. Nothing is computed or copied here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from vllm.model_executor.layers.logits_processor import LogitsProcessor

from worker_agent.engine.vllm.batch_rows import BatchRows


@dataclass(frozen=True, slots=True)
class StepStates:
    """Row i of `hidden` (n, d) is of request `request_ids[i]` with `generated[i]` output tokens so far, that
    of this step not among them; -1: it is in the middle of its prompt. `ready`: when `hidden` has been
    computed; None: already. The tensor is nobody else's.
    """

    request_ids: list[str]
    generated: list[int]
    hidden: torch.Tensor
    ready: torch.Event | None


class HiddenStateTap:
    """Hands over the states of a step for which it was armed. Engine thread only."""

    def __init__(self, model: torch.nn.Module, rows: BatchRows, take: Callable[[StepStates], None]) -> None:
        """Raises RuntimeError when the model has no LogitsProcessor to watch."""
        self._rows = rows
        self._take = take
        self._armed = False
        self._prompts_only = False
        processors = [m for m in model.modules() if isinstance(m, LogitsProcessor)]
        if not processors:
            raise RuntimeError("the model has no LogitsProcessor, so its lengths cannot be predicted")
        self._hooks = [processor.register_forward_pre_hook(self._seen) for processor in processors]

    def arm(self) -> None:
        """Hand over the states of the next step that samples."""
        self._armed, self._prompts_only = True, False

    def arm_for_prompts(self) -> None:
        """Hand over the next states of requests without an output token, whose prompts have just been
        computed; of such requests alone, and of a step with at least one."""
        self._armed = self._prompts_only = True

    def close(self) -> None:
        """Watch no longer."""
        for hook in self._hooks:
            hook.remove()
        self._rows.close()

    def _seen(self, _module: torch.nn.Module, arguments: tuple[object, ...]) -> None:
        if not self._armed:
            return
        hidden, found = arguments[1], self._rows.now()
        # The first call of a step is for what is sampled; log-probabilities of prompts come after it.
        if found is None or not isinstance(hidden, torch.Tensor) or len(hidden) != len(found.request_ids):
            return
        request_ids, generated = found.request_ids, found.generated
        if self._prompts_only:
            rows = [row for row, made in enumerate(generated) if made == 0]
            if not rows:
                return
            request_ids, generated = [request_ids[row] for row in rows], [0] * len(rows)
            hidden = hidden[rows]
        self._armed = False
        ready: torch.Event | None = None
        if hidden.device.type != "cpu":
            ready = torch.Event(hidden.device)
            ready.record()
        self._take(StepStates(request_ids, generated, hidden, ready))
