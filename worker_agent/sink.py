"""Send the engine's outputs to the front ends."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from typing import Final

import msgspec

from tailrace.output_flags import OutputFlag
from tailrace.v1 import worker_pb2
from tailrace.wire.outputs import shrink_outputs
from tailrace.wire.requests import utility_failure
from worker_agent.engine.base import Frames, RequestKey, StepColumns
from worker_agent.engine.errors import EngineRefusal, Unrunnable
from worker_agent.frontends import FrontEnd, FrontEnds
from worker_agent.metrics import WorkerMetrics
from worker_agent.reports import PhaseEvents
from worker_agent.running_requests import RunningRequest, RunningRequests

log = logging.getLogger(__name__)

# Plain ints: this is evaluated for every entry with a flag.
_ENDED: Final = int(OutputFlag.FINISHED | OutputFlag.FAILED)
# Both flags: the first token here belongs to the answer.
_NO_REASONING: Final = int(OutputFlag.PREFILL_DONE | OutputFlag.REASONING_ENDED)
_ANSWER_BEGUN: Final = int(OutputFlag.ANSWER_BEGUN)
# Upper bounds, in bytes, of an entry's columns (six numbers), of a token id, and of a header of a frame or
# message.
_ENTRY_BYTES: Final = 36
_TOKEN_BYTES: Final = 5
_HEADER_BYTES: Final = 16
# Of a reason why a request was not run: it may quote what the client sent.
_REASON_CHARS: Final = 1_000
_REASONS: Final[dict[worker_pb2.RejectCode.ValueType, str]] = {
    worker_pb2.REJECT_CODE_REPLY_TOO_LARGE: (
        "one step's outputs exceed what can be sent ({limit} bytes, --max-message-bytes); request fewer "
        "log-probabilities (prompt_logprobs, logprobs)"
    ),
    worker_pb2.REJECT_CODE_CONGESTED: "too much is unread for one step's outputs",
    worker_pb2.REJECT_CODE_FAILED: "one step's outputs cannot be read",
}


class FrontEndSink:
    """Implement EngineSink: one message per step and front end; inspects only flags and sizes."""

    def __init__(
        self,
        front_ends: FrontEnds,
        running: RunningRequests,
        events: PhaseEvents,
        metrics: WorkerMetrics,
        on_dead: Callable[[str], None],
        give_up: Callable[[RequestKey], None],
    ) -> None:
        """`give_up` frees a request whose outputs cannot be sent; called on the event loop."""
        self._front_ends = front_ends
        self._running = running
        self._events = events
        self._metrics = metrics
        self._on_dead = on_dead
        self._give_up = give_up
        self._loop = asyncio.get_running_loop()

    def on_step(self, columns: StepColumns) -> None:
        """Send a step's outputs from any thread; process their flags on the event loop."""
        self._metrics.tokens += len(columns.token_ids)
        front_end = self._front_ends.by_client(columns.client)
        if front_end is None:
            return
        if columns.refusal is not None:
            self._refuse(front_end, columns, columns.refusal)
            return
        if _message_bytes(columns) > (room := front_end.send_budget_bytes):
            remaining = self._shrink(front_end, columns, room)
            if remaining is None:
                return
            columns = remaining
        front_end.send(_message(columns))
        if any(columns.flags):
            self._loop.call_soon_threadsafe(self._report_flags, columns)

    def on_utility(self, client: int, call_id: int, frames: Frames) -> None:
        """Send a utility call's result."""
        front_end = self._front_ends.by_client(client)
        if front_end is None:
            return
        front_end.utility_calls -= 1
        size = sum(map(len, frames)) + _HEADER_BYTES * (len(frames) + 2)
        if size > front_end.max_message_bytes:
            text = (
                f"the result has {size} bytes, more than {front_end.max_message_bytes} (--max-message-bytes)"
            )
            frames = utility_failure(call_id, text)
        result = worker_pb2.UtilityResult(call_id=call_id, frames=frames)
        front_end.send(worker_pb2.AttachDown(utility=result))

    def on_engine_dead(self, reason: str) -> None:
        """Report that the engine has failed."""
        self._on_dead(reason)

    def _refuse(self, front_end: FrontEnd, columns: StepColumns, refusal: EngineRefusal) -> None:
        """Tell the front end why the message's request was not run."""
        final = isinstance(refusal, Unrunnable)
        rejected = worker_pb2.RequestRejected(
            handle=columns.handles[0],
            epoch=columns.epochs[0],
            code=worker_pb2.REJECT_CODE_UNRUNNABLE if final else worker_pb2.REJECT_CODE_FAILED,
            reason=str(refusal)[:_REASON_CHARS],
        )
        log.warning("request %d of %s was not run: %s", rejected.handle, front_end.frontend_id, refusal)
        front_end.send(worker_pb2.AttachDown(rejected=rejected))
        self._loop.call_soon_threadsafe(self._report_flags, columns)

    def _shrink(
        self, front_end: FrontEnd, columns: StepColumns, send_budget_bytes: int
    ) -> StepColumns | None:
        """Remove the largest outputs until the rest can be sent, and reject only their requests; return None
        if nothing is left.

        Runs on the engine's thread.
        """
        beside = _message_bytes(columns) - sum(map(len, columns.frames))
        everything = dict.fromkeys(range(len(columns.handles)), 0)
        code = worker_pb2.REJECT_CODE_CONGESTED
        try:
            frames, dropped = shrink_outputs(columns.frames, send_budget_bytes - beside)
        except msgspec.DecodeError:
            log.exception("an engine's outputs cannot be read")
            code, frames, dropped = worker_pb2.REJECT_CODE_FAILED, [], everything
        remaining = _without(columns, dropped)
        remaining.frames = frames
        if _message_bytes(remaining) > send_budget_bytes:
            dropped = {**everything, **dropped}
            remaining = _without(columns, dropped)
        for position, size in dropped.items():
            # Alone, and with nothing unread, would it fit?
            fits = (
                size + _ENTRY_BYTES + _TOKEN_BYTES * columns.counts[position] + 1024
                <= front_end.max_message_bytes
            )
            self._reject(
                front_end,
                columns.handles[position],
                columns.epochs[position],
                code if fits else worker_pb2.REJECT_CODE_REPLY_TOO_LARGE,
            )
        return remaining if remaining.handles else None

    def _reject(
        self, front_end: FrontEnd, handle: int, epoch: int, code: worker_pb2.RejectCode.ValueType
    ) -> None:
        """Give up a request whose outputs of one step cannot be sent.

        Sent from the engine's thread before its next step: later would leave a gap in the stream.
        """
        reason = _REASONS[code].format(limit=front_end.max_message_bytes)
        log.warning("request %d of front end %s is given up: %s", handle, front_end.frontend_id, reason)
        rejected = worker_pb2.RequestRejected(handle=handle, epoch=epoch, code=code, reason=reason)
        front_end.send(worker_pb2.AttachDown(rejected=rejected))
        self._loop.call_soon_threadsafe(self._give_up, RequestKey(front_end.client, handle))

    def _report_flags(self, columns: StepColumns) -> None:
        """Process the flags of a step: phase changes and ends."""
        for entry, flags in enumerate(columns.flags):
            if not flags:
                continue
            key = RequestKey(columns.client, columns.handles[entry])
            running = self._running.get(key)
            if running is None or running.epoch != columns.epochs[entry]:
                continue
            if flags & _ANSWER_BEGUN or flags & _NO_REASONING == _NO_REASONING:
                running.pace.begin(columns.first_indices[entry], time.monotonic())
            if flags & _ENDED:
                self._request_ended(key, running, flags, columns.first_indices[entry] + columns.counts[entry])
            else:
                self._events.changed(running.request_id)

    def _request_ended(
        self, key: RequestKey, running: RunningRequest, flags: int, output_tokens: int
    ) -> None:
        self._running.remove(key)
        if flags & OutputFlag.FAILED:
            self._events.gone(running, output_tokens)
            self._metrics.finished["failed"] += 1
            return
        self._metrics.finished["finished"] += 1
        answered = None
        if running.pace.begun:
            running.pace.count(output_tokens, time.monotonic())
            self._metrics.qoe.observe(running.pace.qoe)
            if running.arrived_s is not None:
                answered = running.pace.answered(running.arrived_s, output_tokens)
        self._events.gone(running, output_tokens, answered)


def _message(columns: StepColumns) -> worker_pb2.AttachDown:
    """Return the message of a step, filled in place: a constructor copies each message that it is given."""
    message = worker_pb2.AttachDown()
    outputs = message.outputs
    outputs.step = columns.step
    outputs.frames.extend(columns.frames)
    outputs.handles.extend(columns.handles)
    outputs.epochs.extend(columns.epochs)
    outputs.first_indices.extend(columns.first_indices)
    outputs.counts.extend(columns.counts)
    outputs.token_ids.extend(columns.token_ids)
    outputs.flags.extend(columns.flags)
    return message


def _message_bytes(columns: StepColumns) -> int:
    """Return an upper bound of the size of the step's message without encoding it."""
    frames = columns.frames
    return (
        sum(map(len, frames))
        + _ENTRY_BYTES * len(columns.handles)
        + _TOKEN_BYTES * len(columns.token_ids)
        + _HEADER_BYTES * (len(frames) + 8)
    )


def _without(columns: StepColumns, dropped: Collection[int]) -> StepColumns:
    """Return the columns without these entries; the caller sets the frames."""
    excluded = set(dropped)
    remaining = StepColumns(columns.client, columns.step, [])
    offset = 0
    for entry, count in enumerate(columns.counts):
        if entry not in excluded:
            remaining.handles.append(columns.handles[entry])
            remaining.epochs.append(columns.epochs[entry])
            remaining.first_indices.append(columns.first_indices[entry])
            remaining.counts.append(count)
            remaining.token_ids.extend(columns.token_ids[offset : offset + count])
            remaining.flags.append(columns.flags[entry])
        offset += count
    return remaining
