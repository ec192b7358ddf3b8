"""One step's outputs, grouped by front end into vLLM's messages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np

from tailrace.output_flags import OutputFlag
from tailrace.wire.outputs import EngineCoreOutput, FinishReason, encode_outputs, error_outputs
from worker_agent.engine.base import EngineSink, StepColumns, Submission
from worker_agent.engine.errors import EngineRefusal
from worker_agent.engine.simulated.request import Request

_encode = msgspec.msgpack.Encoder().encode

# vLLM's EngineCoreEventType.
_QUEUED: Final = 1
_SCHEDULED: Final = 2
# vLLM's extension code for an array's bytes inside the message.
_RAW_VIEW: Final = 3


@dataclass(slots=True)
class _Batch:
    columns: StepColumns
    outputs: list[EngineCoreOutput] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)


class Emitter:
    """Collects the outputs of one step and delivers them together."""

    def __init__(self, sink: EngineSink) -> None:
        self._sink = sink
        self._batches: dict[int, _Batch] = {}
        self.steps = 0

    def add(
        self,
        request: Request,
        index: int,
        tokens: list[int],
        flags: int,
        finish: FinishReason | None = None,
        stop_reason: int | None = None,
    ) -> None:
        """Add one request's outputs; `index` is that of the first new token."""
        batch = self._batches.get(request.key.client)
        if batch is None:
            batch = self._batches[request.key.client] = _Batch(
                StepColumns(request.key.client, self.steps, [])
            )
        columns = batch.columns
        columns.handles.append(request.key.handle)
        columns.epochs.append(request.epoch)
        columns.first_indices.append(index)
        columns.counts.append(len(tokens))
        columns.token_ids += tokens
        columns.flags.append(flags)
        output = EngineCoreOutput(request.request_id, tokens)
        batch.outputs.append(output)
        if flags or request.logprobs is not None:
            _add_details(output, request, flags)
        if finish is not None:
            output.finish_reason = finish
            output.stop_reason = stop_reason
            output.trace_headers = request.trace_headers
            batch.finished.append(request.request_id)

    def flush(self) -> None:
        """Deliver the collected outputs."""
        self.steps += 1
        batches, self._batches = self._batches, {}
        for batch in batches.values():
            batch.columns.frames = encode_outputs(batch.outputs, batch.finished)
            self._sink.on_step(batch.columns)

    def refuse(self, submission: Submission, refusal: EngineRefusal | None = None) -> None:
        """Fail a request that cannot run here, at once."""
        columns = StepColumns(
            client=submission.key.client,
            step=self.steps,
            frames=error_outputs([submission.request_id]),
            handles=[submission.key.handle],
            epochs=[submission.epoch],
            first_indices=[len(submission.output_token_ids)],
            counts=[0],
            flags=[int(OutputFlag.FAILED)],
            refusal=refusal,
        )
        self.steps += 1
        self._sink.on_step(columns)


def _add_details(output: EngineCoreOutput, request: Request, flags: int) -> None:
    """Add vLLM's events, prefill statistics and log-probabilities."""
    if flags & OutputFlag.PREFILL_DONE:
        output.events = msgspec.Raw(
            _encode(
                [
                    {"type": _QUEUED, "timestamp": request.submitted_s},
                    {"type": _SCHEDULED, "timestamp": request.submitted_s},
                ]
            )
        )
        tokens = len(request.prompt)
        # All fields, as vLLM writes them, because its Rust front end may not know their defaults.
        output.prefill_stats = msgspec.Raw(
            _encode(
                {
                    "num_prompt_tokens": tokens,
                    "num_computed_tokens": tokens,
                    "num_cached_tokens": 0,
                    "num_local_cached_tokens": 0,
                    "num_external_cached_tokens": 0,
                    "num_cache_creation_tokens": 0,
                }
            )
        )
    if request.logprobs is not None and output.new_token_ids:
        output.new_logprobs = _logprobs(output.new_token_ids[0], max(request.logprobs, 0))


def _logprobs(token: int, alternatives: int) -> msgspec.Raw:
    """Return vLLM's LogprobsLists for one token: the token, then the most likely ones, starting with
    itself."""
    ids = np.array([[token, *(token + i for i in range(alternatives))]], np.int64)
    values = np.array([[-0.1, *(-0.1 - i for i in range(alternatives))]], np.float32)
    ranks = np.ones(1, np.int64)
    return msgspec.Raw(_encode([*(_inline(array) for array in (ids, values, ranks)), None]))


def _inline(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> tuple[object, ...]:
    return array.dtype.str, array.shape, msgspec.msgpack.Ext(_RAW_VIEW, array.tobytes())
