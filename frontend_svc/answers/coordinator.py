"""Coordinate the kept answers of one front end.

Three sides meet here: utility calls of the API server (open, note and close an answer), the engine outputs of
the streams that produce answers, and requests of other front ends (copies, look-ups, hand-overs). opening.py
decides what a request gets; the logs themselves are in store.py, copies to the second front end in
replication.py.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

from frontend_svc.admission import Refusal
from frontend_svc.answers.calls import (
    CLOSE,
    NOTE,
    OPEN,
    CloseCall,
    NoteCall,
    OpenCall,
    OpenReply,
    parse_run_name,
)
from frontend_svc.answers.delivery import Delivery, LoggedProgress, progress_of
from frontend_svc.answers.metrics import AnswerMetrics
from frontend_svc.answers.opening import SUPERSEDED, AnswerOpener, AnswerQuery
from frontend_svc.answers.peers import REFUSAL_REASONS, AnswerPeers, decode_part, encode_part
from frontend_svc.answers.replication import Replication
from frontend_svc.answers.store import AnswerStore, KeptAnswer, LogEntry, PartRefusal, RemovalReason
from frontend_svc.streams import FINISHED, Stream
from tailrace.request_ids import without_number
from tailrace.service.tasks import cancel, task_error
from tailrace.telemetry.incidents import loop_failed, loop_named
from tailrace.v1 import answers_pb2
from tailrace.wire.outputs import detach_buffers, rename_output
from tailrace.wire.requests import UtilityCall, utility_failure, utility_result

log = logging.getLogger(__name__)

_LOOP: Final = loop_named("calls of the API server")
# Deadline of an API server's call, and how many calls may be pending.
_CALL_S: Final = 15.0
_CALLS_MAX: Final = 4_096


def _new_id() -> str:
    return secrets.token_hex(16)


class ApiServerSink(Protocol):
    """Send to the API server (the used part of outputs.Outputs)."""

    def send_output(self, handle: int, frames: Sequence[bytes], tokens: int, last: bool) -> None:
        """Send one output; `handle` 0: no stream carries it."""

    def reply(self, frames: Sequence[bytes]) -> None:
        """Send a utility call's result."""


@dataclass(frozen=True, slots=True)
class RunRequest:
    """An engine request that belongs to an answer's run."""

    delivery: Delivery
    part: str
    progress: LoggedProgress


class AnswerCoordinator:
    """Implement kept answers, except for gRPC. Called on the event loop."""

    def __init__(
        self,
        frontend_id: str,
        keep_s: float,
        store: AnswerStore,
        peers: AnswerPeers,
        metrics: AnswerMetrics,
        clock: Callable[[], float] = time.monotonic,
        new_id: Callable[[], str] = _new_id,
    ) -> None:
        """`keep_s`: seconds after which an unused answer is removed. `clock`: seconds. `new_id`: returns an
        unguessable id."""
        self._keep_s = keep_s
        self.store = store
        self._peers = peers
        self._metrics = metrics
        self._clock = clock
        self._sink: ApiServerSink | None = None
        self._end_request: Callable[[str, Refusal], None] = lambda name, refusal: None
        self._replication = Replication(
            frontend_id,
            store,
            peers,
            self._on_released,
            self._on_superseded,
            metrics.copied,
            keep_s / 3,
            clock,
        )
        metrics.watch(store, lambda: len(peers.reachable()), self._replication)
        self._deliveries: dict[str, Delivery] = {}
        # Streams that produce answers, by handle, until their last output.
        self._streams: dict[int, tuple[Stream, Delivery, str]] = {}
        # Notes that the second front end does not have yet: the entry number, and the future that waits for
        # it.
        self._pending_notes: dict[str, list[tuple[int, asyncio.Future[None]]]] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._opener = AnswerOpener(store, peers, self, metrics, clock, new_id)

    def bind(self, sink: ApiServerSink, end_request: Callable[[str, Refusal], None]) -> None:
        """Set the sink, and what ends the API server's request of a name, wherever it runs, with an error.

        Must be called before anything else.
        """
        self._sink, self._end_request = sink, end_request

    async def close(self) -> None:
        """Cancel all pending calls and copies."""
        await cancel(*self._calls)
        await self._replication.close()
        await self._peers.close()

    def tick(self) -> None:
        """Expire answers and advance replication. Called every half second."""
        for answer in self.store.expire(self._clock(), self._keep_s):
            self._replication.discard(answer)
        self._peers.tick()
        self._replication.tick()

    # ---- streams that produce answers

    def join_run(self, name: str, request_id: str) -> RunRequest | Refusal:
        """Register an engine request with the run of this name; return a refusal if the run was superseded.

        `request_id` ends in a number that differs in each run.
        """
        parsed = parse_run_name(name)
        delivery = None if parsed is None else self._deliveries.get(parsed[0])
        if parsed is None or delivery is None or delivery.run != parsed[1] or not delivery.current:
            return SUPERSEDED
        part = without_number(request_id)
        delivery.request_ids[part] = request_id
        progress = progress_of(delivery.answer, part)
        return RunRequest(delivery, part, progress)

    def attach_stream(self, stream: Stream, request: RunRequest) -> None:
        """Let this stream produce what is missing of the request."""
        request.delivery.handles[request.part] = stream.handle
        self._streams[stream.handle] = (stream, request.delivery, request.part)

    def deliver(self, request: RunRequest) -> None:
        """Send the API server what is already in the log for this request."""
        self._deliver_due(request.delivery)

    def __bool__(self) -> bool:
        """Return whether any stream produces an answer."""
        return bool(self._streams)

    def is_kept(self, handle: int) -> bool:
        """Return whether outputs of this stream must go to `append_output`."""
        return handle in self._streams

    def append_output(
        self, handle: int, frames: Sequence[bytes], token_ids: Sequence[int], flags: int
    ) -> None:
        """Append an accepted output of a stream; it is sent on once the second front end has it."""
        stream, delivery, part = self._streams[handle]
        answer = delivery.answer
        if flags & FINISHED:
            del self._streams[handle]
        if not delivery.current:
            return
        if answer.removed:
            self._show(delivery, part, frames, len(token_ids), bool(flags & FINISHED))
            return
        model = stream.model if stream.accepted == len(token_ids) else ""
        self._append(answer, LogEntry(part, tuple(token_ids), flags, tuple(detach_buffers(frames)), model))

    def instance_heard(self) -> None:
        """Note that an instance sent outputs, of any stream."""
        self._replication.instance_heard()

    def stream_ended(self, handle: int) -> None:
        """Drop a stream that ended without a last output: its client disconnected, or it was given up."""
        self._streams.pop(handle, None)

    def stream_failed(self, handle: int) -> None:
        """Drop a stream and remove its answer, which must not be run again."""
        entry = self._streams.pop(handle, None)
        if entry is not None:
            answer = entry[1].answer
            self._remove(answer, RemovalReason.FAILED)
            # No second front end gets it any more, and the other streams of the answer go on.
            self._on_released(answer, len(answer.entries))

    # ---- calls of the API server

    def handle_call(self, call: UtilityCall) -> None:
        """Handle one of calls.METHODS."""
        # An answer whose run is not closed would be kept forever: closing is cheap and never refused.
        if len(self._calls) >= _CALLS_MAX and call.method != CLOSE:
            self._reply(utility_failure(call.call_id, f"{_CALLS_MAX} calls are pending already"))
            return
        try:
            work = self._call_coroutine(call)
        except msgspec.DecodeError as error:
            self._reply(utility_failure(call.call_id, f"malformed call: {error}"))
            return
        task = asyncio.create_task(self._run_call(call.call_id, work), name=call.method)
        self._calls.add(task)
        task.add_done_callback(lambda done: self._call_done(call.call_id, done))

    def _call_coroutine(self, call: UtilityCall) -> Coroutine[None, None, OpenReply | None]:
        match call.method:
            case method if method == OPEN:
                return self.open_answer(msgspec.msgpack.decode(call.args, type=tuple[OpenCall])[0])
            case method if method == NOTE:
                return self.add_note(msgspec.msgpack.decode(call.args, type=tuple[NoteCall])[0])
            case _:
                return self.close_run(msgspec.msgpack.decode(call.args, type=tuple[CloseCall])[0])

    async def _run_call(self, call_id: int, work: Coroutine[None, None, OpenReply | None]) -> None:
        try:
            async with asyncio.timeout(_CALL_S):
                result = await work
        except TimeoutError:
            self._reply(utility_failure(call_id, f"it took more than {_CALL_S:g} s"))
            return
        self._reply(utility_result(call_id, msgspec.to_builtins(result, builtin_types=(bytes,))))

    def _call_done(self, call_id: int, task: asyncio.Task[None]) -> None:
        self._calls.discard(task)
        if (error := task_error(task)) is not None:
            loop_failed(_LOOP, "kept answers", error)
            self._reply(utility_failure(call_id, "internal error"))

    async def open_answer(self, call: OpenCall) -> OpenReply:
        """Begin to keep a new request's answer, or resume a kept one."""
        return await self._opener.open(call)

    async def add_note(self, call: NoteCall) -> None:
        """Append a note and wait until the second front end has it."""
        delivery = self._deliveries.get(call.answer_id)
        if delivery is None or delivery.run != call.run or not delivery.current or delivery.answer.removed:
            return
        answer = delivery.answer
        future = asyncio.get_running_loop().create_future()
        self._pending_notes.setdefault(call.answer_id, []).append((len(answer.entries) + 1, future))
        self._append(answer, LogEntry("", (), 0, (call.note,)))
        await future

    async def close_run(self, call: CloseCall) -> None:
        """End a run whose HTTP response has ended, or is an error: its key is free when this returns,
        unless the second front end failed to remove it."""
        delivery = self._deliveries.get(call.answer_id)
        if delivery is None or delivery.run != call.run:
            return
        self._close_delivery(delivery)
        answer = delivery.answer
        if not delivery.current or answer.removed:
            return
        if not call.begun and not answer.entries:
            # Refused or malformed: there is no answer, and the key becomes free, here and where the copy is.
            gone = self._remove(answer, None)
            if answer.head.key:
                await gone.wait()
            return
        self.store.end_run(answer, call.run, call.complete, self._clock())
        self._replication.appended(answer)

    # ---- runs, for requests that open answers

    def begin_run(self, answer: KeptAnswer, arrival: int, replica: str, replica_entries: int | None) -> None:
        """Begin a run for the request with this arrival number, and end the one in progress."""
        self._end_current_run(answer.head.answer_id)
        self._deliveries[answer.head.answer_id] = Delivery(answer, arrival)
        self._replication.begin(answer, replica, replica_entries)

    def is_superseded(self, answer_id: str, arrival: int) -> bool:
        """Return whether a later request has begun a run already, while this one was still looking for the
        answer."""
        delivery = self._deliveries.get(answer_id)
        return delivery is not None and delivery.current and delivery.arrival > arrival

    async def confirm_key(self, answer: KeptAnswer) -> bool:
        """Return whether no other front end has the answer's key."""
        return await self._replication.confirm_key(answer)

    def withdraw(self, answer: KeptAnswer) -> None:
        """End the run in progress and remove its answer."""
        self._end_current_run(answer.head.answer_id)
        self._remove(answer, None)

    # ---- other front ends

    def handle_keep(self, request: answers_pb2.KeepRequest) -> answers_pb2.KeepReply:
        """Apply parts of answers that another front end serves."""
        reply = answers_pb2.KeepReply()
        # Removals first: an answer may have been begun again there since, and be among the parts.
        for answer_id in request.forgotten:
            answer = self.store.get(answer_id)
            if answer is not None and not answer.served_here and answer.frontend_id == request.frontend_id:
                self.store.remove(answer, RemovalReason.EXPIRED)
        for message in request.parts:
            part = decode_part(message)
            local = self.store.get(part.answer_id)
            served = local is not None and local.served_here
            applied = self.store.apply_part(part, self._clock())
            if isinstance(applied, PartRefusal):
                reply.refused.add(answer_id=part.answer_id, reason=REFUSAL_REASONS[applied])
            if served and local is not None and not local.served_here:
                # Also if the part itself was refused for lack of room.
                self._replication.stop(local)
                self._end_current_run(part.answer_id)
        return reply

    def handle_find(self, request: answers_pb2.FindAnswerRequest) -> answers_pb2.FindAnswerReply:
        """Return what is known here of an answer."""
        answer = AnswerQuery(request.tenant, request.answer_id, request.idempotency_key).local(self.store)
        if answer is None:
            expired = (
                bool(request.answer_id)
                and self.store.removal_reason(request.tenant, request.answer_id) is not None
            )
            return answers_pb2.FindAnswerReply(expired=expired)
        head = answer.head
        return answers_pb2.FindAnswerReply(
            answer_id=head.answer_id,
            run=answer.run,
            entries=len(answer.entries),
            serves=answer.served_here,
            tenant=head.tenant,
            path=head.path,
            digest=head.digest,
            streams=head.streams,
            idempotency_key=head.key,
            ended_runs=answer.ended,
        )

    def handle_claim(self, request: answers_pb2.ClaimAnswerRequest) -> answers_pb2.ClaimAnswerReply:
        """Hand an answer over to another front end."""
        answer = self.store.get(request.answer_id)
        if answer is None:
            return answers_pb2.ClaimAnswerReply()
        if answer.served_here:
            if self._replication.copied_to(answer) == request.frontend_id:
                self._replication.stop(answer)
            else:
                self._replication.discard(answer)
        part = self.store.hand_over(answer, request.frontend_id, self._clock())
        self._end_current_run(request.answer_id)
        self._metrics.handed_over += 1
        return answers_pb2.ClaimAnswerReply(part=encode_part(part))

    # ---- internal

    def _append(self, answer: KeptAnswer, entry: LogEntry) -> None:
        self.store.append(answer, entry, self._clock())
        if answer.removed:
            log.info("answer %s is too large to be kept", answer.head.answer_id)
            self._replication.discard(answer)
            self._on_released(answer, len(answer.entries))
        else:
            self._replication.appended(answer)

    def _on_released(self, answer: KeptAnswer, entries: int) -> None:
        answer_id = answer.head.answer_id
        delivery = self._deliveries.get(answer_id)
        if delivery is not None and delivery.answer is answer and delivery.current:
            delivery.released = max(delivery.released, entries)
            self._deliver_due(delivery)
        waiting = self._pending_notes.pop(answer_id, [])
        for number, future in waiting:
            if number > entries:
                self._pending_notes.setdefault(answer_id, []).append((number, future))
            elif not future.done():
                future.set_result(None)

    def _on_superseded(self, answer: KeptAnswer) -> None:
        """Drop an answer that another front end serves by now; this branch of its log must not be
        continued."""
        self._metrics.superseded += 1
        self._end_current_run(answer.head.answer_id)
        self.store.remove(answer, None)

    def _deliver_due(self, delivery: Delivery) -> None:
        for part, entry in delivery.take_due():
            frames = rename_output(entry.frames, delivery.request_ids[part])
            self._show(delivery, part, frames, len(entry.token_ids), bool(entry.flags & FINISHED))

    def _show(self, delivery: Delivery, part: str, frames: Sequence[bytes], tokens: int, last: bool) -> None:
        assert self._sink is not None
        self._sink.send_output(delivery.handles.get(part, 0), frames, tokens, last)

    def _end_current_run(self, answer_id: str) -> None:
        """End the requests that an earlier run still has in progress."""
        delivery = self._deliveries.get(answer_id)
        if delivery is None:
            return
        self._close_delivery(delivery)
        for name in delivery.request_ids.values():
            self._end_request(name, SUPERSEDED)

    def _close_delivery(self, delivery: Delivery) -> None:
        answer_id = delivery.answer.head.answer_id
        if self._deliveries.get(answer_id) is delivery:
            del self._deliveries[answer_id]
        for handle in delivery.handles.values():
            self._streams.pop(handle, None)
        for _, future in self._pending_notes.pop(answer_id, []):
            if not future.done():
                future.set_result(None)

    def _remove(self, answer: KeptAnswer, reason: RemovalReason | None) -> asyncio.Event:
        """Remove an answer; return the event of `Replication.discard`."""
        gone = self._replication.discard(answer)
        self.store.remove(answer, reason)
        return gone

    def _reply(self, frames: Sequence[bytes]) -> None:
        assert self._sink is not None
        self._sink.reply(frames)
