"""Observe the hidden states from which running requests sample their next tokens.

vLLM passes the last layer's output, after the final norm and only at the positions to be sampled, to the
model's LogitsProcessor, where a torch forward hook reads it. Nothing is computed or copied here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.logits_processor import LogitsProcessor


@dataclass(frozen=True, slots=True)
class Rows:
    """Row i belongs to request `request_ids[i]`, which has `generated[i]` output tokens before this step, or
    -1 if it is in the middle of its prompt."""

    request_ids: list[str]
    generated: list[int]


@dataclass(frozen=True, slots=True)
class BatchRows:
    """The rows of one model runner. `now` returns those of the step that is sampling, or None."""

    now: Callable[[], Rows | None]
    close: Callable[[], None]


def rows_of_v1(runner: Any) -> BatchRows:
    """Return the rows of Model Runner V1."""

    def now() -> Rows:
        batch = runner.input_batch
        in_prompt = runner.discard_request_mask.np[: batch.num_reqs]
        request_ids = list(batch.req_ids)
        generated = [
            -1 if unfinished else len(runner.requests[request_id].output_token_ids)
            for request_id, unfinished in zip(request_ids, in_prompt, strict=True)
        ]
        return Rows(request_ids, generated)

    return BatchRows(now, _nothing)


def rows_of_v2(runner: Any) -> BatchRows:
    """Return the rows of Model Runner V2; wraps its `sample` method, which gets the batch as an argument."""
    sample = runner.sample
    batches: list[Any] = []

    def watched(hidden_states: Any, input_batch: Any, grammar_output: Any) -> Any:
        batches.append(input_batch)
        try:
            return sample(hidden_states, input_batch, grammar_output)
        finally:
            batches.pop()

    def now() -> Rows | None:
        if not batches:
            return None
        batch = batches[-1]
        after = batch.num_computed_tokens_np + batch.num_scheduled_tokens
        prompts = runner.req_states.prompt_len.np[batch.idx_mapping_np]
        generated = [
            -1 if tokens < prefill else int(tokens - prompt)
            for tokens, prefill, prompt in zip(after, batch.prefill_len_np, prompts, strict=True)
        ]
        return Rows(list(batch.req_ids), generated)

    def close() -> None:
        runner.sample = sample

    runner.sample = watched
    return BatchRows(now, close)


def _nothing() -> None:
    return


@dataclass(frozen=True, slots=True)
class StepStates:
    """Row i of `hidden` (n, d) belongs to request `request_ids[i]`, which has `generated[i]` output tokens
    before this step, or -1 if it is in the middle of its prompt. The event `ready` is complete when `hidden`
    has been computed (None: it has). The tensor is not shared.
    """

    request_ids: list[str]
    generated: list[int]
    hidden: torch.Tensor
    ready: torch.Event | None


class HiddenStateTap:
    """Passes the states of a step to `take` if it was armed before that step. Engine thread only."""

    def __init__(self, model: torch.nn.Module, rows: BatchRows, take: Callable[[StepStates], None]) -> None:
        """Raises RuntimeError if the model has no LogitsProcessor to observe."""
        self._rows = rows
        self._take = take
        self._armed = False
        self._prompts_only = False
        processors = [m for m in model.modules() if isinstance(m, LogitsProcessor)]
        if not processors:
            raise RuntimeError("the model has no LogitsProcessor, so its lengths cannot be predicted")
        self._hooks = [processor.register_forward_pre_hook(self._seen) for processor in processors]

    def arm(self) -> None:
        """Observe the next step that samples."""
        self._armed, self._prompts_only = True, False

    def arm_for_prompts(self) -> None:
        """Observe the next step that completes a prompt, and only the requests whose prompts it completes."""
        self._armed = self._prompts_only = True

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._rows.close()

    def _seen(self, _module: torch.nn.Module, arguments: tuple[object, ...]) -> None:
        if not self._armed:
            return
        hidden, found = arguments[1], self._rows.now()
        # A step's first call is for sampling; calls for log-probabilities of prompts follow.
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
