"""Carries every stream: from the API server to instances, and from instances back.

The parts decide (streams.py, adopt.py, recovery.py, dispatch.py); this is where their messages meet.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Protocol

import msgspec

from frontend_svc.admission import (
    CANNOT_GO_ON,
    NO_INSTANCE,
    OVERLOADED,
    TENANT_FULL,
    TOO_MANY_REQUESTS,
    Refusal,
)
from frontend_svc.adopt import Adoptions
from frontend_svc.answers.calls import ANSWER_HEADER, METHODS
from frontend_svc.answers.desk import AnswerDesk, RunRequest
from frontend_svc.dispatch import Dispatch, Relocations
from frontend_svc.fair_gate import FairGate
from frontend_svc.links import Loss, Workers, abort, request_bytes
from frontend_svc.liveness import Liveness
from frontend_svc.observer import StreamObserver
from frontend_svc.pacing import Pacer
from frontend_svc.placement import Placed, Placement
from frontend_svc.recovery import Recovery
from frontend_svc.settings import Limits, Patience
from frontend_svc.streams import (
    FINISHED,
    PREFILL_DONE,
    Accepted,
    MalformedStep,
    Needs,
    Reject,
    Stream,
    StreamTable,
)
from frontend_svc.utilities import Utilities
from tailrace.adapter_versions import AdapterVersions
from tailrace.cluster import Phase
from tailrace.service.message_stream import MIN_MESSAGE_BYTES
from tailrace.tenancy.fair_queue import TenantQueueFull
from tailrace.tenancy.share import SHARE_HEADER, Share
from tailrace.v1 import worker_pb2
from tailrace.wire import (
    EngineCoreOutput,
    FinishReason,
    RequestHead,
    UtilityCall,
    encode_outputs,
    filter_outputs,
    read_request,
    split_outputs,
)
from tailrace.wire.cache_keys import read_cache_keys

log = logging.getLogger(__name__)


class Output(Protocol):
    """Where outputs for the API server go."""

    def send(self, frames: Sequence[bytes]) -> None:
        """One message of vLLM's protocol."""


class Carrier:
    """Sink of the engine-core socket, of all links and of dispatch."""

    def __init__(
        self,
        table: StreamTable,
        workers: Workers,
        placement: Placement,
        output: Output,
        observer: StreamObserver,
        pacer: Pacer,
        patience: Patience,
        limits: Limits,
        on_full: Callable[[bool], None],
        pace_s: float = 0.0,
        answers: AnswerDesk | None = None,
    ) -> None:
        """`on_full` is told whether new requests would be refused with 429. `pace_s`: seconds a token at
        which answers are shown whose requests do not say; 0: at once. `answers` None: none are kept."""
        self._table = table
        self._workers = workers
        self._output = output
        self._pacer = pacer
        self._pace_s = pace_s
        self._answers = answers
        self._limits = limits
        self._on_full = on_full
        self._observer = observer
        self._dispatch = Dispatch(table, placement, workers, self, patience)
        self.fair: FairGate | None = None
        if limits.fair_backlog_tokens:
            self.fair = FairGate(
                limits.fair_backlog_tokens,
                limits.max_waiting,
                patience.new_s,
                self._dispatch.start_waited,
                self._turn_down,
                observer.waited,
            )
        self._recovery = Recovery(table, self._dispatch, workers, self._give_up, observer.engine_died)
        self._relocations = Relocations(table, placement, workers, self._dispatch, self)
        self._adoptions = Adoptions(table, workers, observer.adopted, placement.may_run)
        self._liveness = Liveness(table, workers)
        self._utilities = Utilities(workers, output.send)
        self._adapters = AdapterVersions()
        self.reply = output.send
        if answers is not None:
            answers.bind(self)

    async def close(self) -> None:
        """Cancel all that is under way."""
        if self.fair is not None:
            self.fair.close()
        self._adoptions.close()
        self._pacer.close()
        self._utilities.close()
        if self._answers is not None:
            await self._answers.close()
        await self._relocations.close()
        await self._dispatch.close()

    # ---- from the API server

    def on_add(self, frames: Sequence[bytes]) -> None:
        """A new request. Raises msgspec.DecodeError when it is none."""
        head = read_request(frames)
        refusal = self._refusal(frames)
        if refusal is not None:
            log.warning("%s refused: %s", head.request_id, refusal.message)
            self._observer.refused(refusal.status)
            self._output.send(_error(head.request_id, refusal))
            return
        headers = head.trace_headers or {}
        run_request: RunRequest | None = None
        if self._answers is not None and (run := headers.get(ANSWER_HEADER)) is not None:
            joining = self._answers.join(run, head.request_id, head.external_req_id or head.request_id)
            if isinstance(joining, Refusal):
                self._output.send(_error(head.request_id, joining))
                return
            run_request = joining
            if run_request.progress.finished:
                self._answers.tell(run_request)
                return
        try:
            stream = self._table.open(
                head.request_id, frames, head.prompt_tokens, head.max_tokens or 0, time.monotonic()
            )
        except ValueError:
            log.exception("refused a request")
            return
        if head.adapter or not head.generates:
            stream.needs = Needs(head.generates, head.adapter)
        if head.adapter:
            stream.adapter_version = self._adapter_version(frames)
        if head.pace_tpot_ms is not None:
            stream.pace_s = head.pace_tpot_ms / 1e3
        else:
            stream.pace_s = self._pace_s
        self._observer.arrived(stream, headers.get("traceparent", ""))
        if run_request is not None:
            self._go_on(stream, run_request)
        if self.fair is None or stream.accepted:
            self._dispatch.start(stream)
        else:
            self._wait_for_turn(self.fair, stream, head)

    def _wait_for_turn(self, fair: FairGate, stream: Stream, head: RequestHead) -> None:
        share = Share.decode((head.trace_headers or {}).get(SHARE_HEADER, ""))
        try:
            fair.arrive(stream, share, head.priority)
        except TenantQueueFull:
            self._turn_down(stream, TENANT_FULL)

    def _turn_down(self, stream: Stream, refusal: Refusal) -> None:
        """It never came to an instance."""
        log.info("%s refused: %s", stream.request_id, refusal.message)
        self._end_with_error(stream, refusal)
        self._observer.turned_down(stream, refusal.status)

    def _go_on(self, stream: Stream, run_request: RunRequest) -> None:
        """It has been under way before, perhaps at another front end."""
        assert self._answers is not None
        progress = run_request.progress
        self._table.restore(stream, progress.token_ids, progress.flags, progress.model)
        self._answers.tell(run_request)
        self._answers.carries(stream, run_request)
        if stream.phase is Phase.ANSWERING:
            stream.first_answer_s, stream.first_answer_index = stream.arrived_s, stream.accepted
            self._pacer.begin(stream, 0)

    def _adapter_version(self, frames: Sequence[bytes]) -> str:
        read = read_cache_keys(frames)
        adapter = None if read is None else read.keys.adapter
        return "" if adapter is None else self._adapters.of(adapter[1])

    def tick(self) -> None:
        """Called every half second."""
        self._liveness.tick(time.monotonic())
        self._recovery.tick()
        if self._answers is not None:
            self._answers.tick()
        self._on_full(len(self._table) >= self._limits.max_streams)

    def _refusal(self, frames: Sequence[bytes]) -> Refusal | None:
        """Why a new request is not even placed; None: it is."""
        if len(self._table) >= self._limits.max_streams:
            self._on_full(True)
            return TOO_MANY_REQUESTS
        waiting = 0 if self.fair is None else len(self.fair)
        if len(self._dispatch) + waiting >= self._limits.max_unplaced:
            return NO_INSTANCE
        size = request_bytes(frames, 0)
        if size <= MIN_MESSAGE_BYTES:
            return None
        # Where no instance is attached, it waits for one.
        limits = [self._workers.max_message_bytes(each) for each in self._workers.attached()]
        if limits and size > max(limits):
            return Refusal(413, f"The request has {size} bytes; instances take {max(limits)} at most.")
        return None

    def on_abort(self, request_ids: Sequence[str]) -> None:
        """Free these requests wherever they are."""
        for request_id in request_ids:
            self._pacer.drop(request_id)
            stream = self._table.find(request_id)
            if stream is None:
                continue
            self._abort(stream)
        if self._adoptions.waiting:
            self._adoptions.progress()

    def _abort(self, stream: Stream) -> None:
        self._dispatch.cancel(stream)
        self._close(stream)
        if stream.owner is not None:
            self._workers.send(stream.owner, abort([stream.handle]))
        if self._answers is not None:
            self._answers.ended(stream.handle)
        self._observer.aborted(stream)

    def _close(self, stream: Stream) -> None:
        self._table.close(stream)
        if self.fair is not None:
            self.fair.release(stream.handle)

    def on_utility(self, call: UtilityCall, frames: Sequence[bytes]) -> None:
        """A call of an engine-core method."""
        if self._answers is not None and call.method in METHODS:
            self._answers.call(call)
        else:
            self._utilities.call(call, frames)

    # ---- from kept answers

    def show(self, handle: int, frames: Sequence[bytes], tokens: int, last: bool) -> None:
        """See ApiServerSink."""
        if self._pacer.paces(handle):
            self._pacer.put(handle, frames, tokens, last)
        else:
            self._output.send(frames)

    def cut(self, request_id: str, refusal: Refusal) -> None:
        """See ApiServerSink."""
        self._pacer.drop(request_id)
        stream = self._table.find(request_id)
        if stream is not None:
            self._abort(stream)
        self._output.send(_error(request_id, refusal))

    # ---- from instances

    def on_attached(self, instance_id: str, hello: worker_pb2.WorkerHello) -> None:
        """A new instance can answer what nobody could."""
        self._recovery.attached(instance_id, hello.incarnation)
        self._utilities.instance_attached(instance_id)
        self._dispatch.fleet_changed()

    def fleet_changed(self) -> None:
        """Membership has changed: streams that wait for an instance look again."""
        self._dispatch.fleet_changed()

    def on_lost(self, instance_id: str, loss: Loss) -> None:
        """Its streams go on elsewhere."""
        self._utilities.instance_lost(instance_id)
        self._liveness.lost(instance_id)
        self._observer.lost(self._recovery.instance_lost(instance_id, loss), instance_id, loss.reason)
        if self._adoptions.waiting:
            self._adoptions.progress()

    def on_process_gone(self, instance_id: str) -> None:
        """It was lost before; now it is known that its process has ended."""
        self._recovery.process_gone(instance_id)

    def on_message(self, instance_id: str, message: worker_pb2.AttachDown) -> None:
        """Anything an attached instance says."""
        match message.WhichOneof("body"):
            case "outputs":
                self._on_step(instance_id, message.outputs)
            case "adopt":
                self._adoptions.ask(instance_id, message.adopt)
            case "ownership_query":
                self._adoptions.ownership(instance_id, message.ownership_query)
            case "hand_back":
                self._relocations.hand_back(instance_id, message.hand_back)
            case "utility":
                self._utilities.result(instance_id, message.utility)
            case "held_reply":
                self._on_missing(instance_id, message.held_reply)
            case "taken":
                self._table.note_taken(instance_id, message.taken.handle, message.taken.epoch)
            case "rejected":
                self._on_turned_away(instance_id, message.rejected)
            case body:
                log.warning("unexpected %s from %s", body, instance_id)

    def _on_step(self, instance_id: str, step: worker_pb2.StepOutputs) -> None:
        try:
            verdict = self._table.accept(instance_id, step)
        except MalformedStep as error:
            # What of it belongs to whom is not known: whatever the instance owns begins anew on another
            # stream.
            log.error("malformed outputs from %s: %s", instance_id, error)
            self._workers.cut(instance_id, f"malformed outputs: {error}")
            return
        self._liveness.stepped(instance_id, step.step, time.monotonic())
        if self._pacer or self._answers:
            self._send_apart(instance_id, step, verdict)
        elif verdict.keep is None:
            self._output.send(list(step.frames))
        elif any(verdict.keep):
            self._send_kept(instance_id, step, verdict, verdict.keep)
        if verdict.flagged:
            self._begin_pacing(verdict)
            self._release(verdict)
        self._observer.accepted(verdict)
        if verdict.rejected:
            self._on_rejected(instance_id, verdict)
        if self._recovery.watching:
            self._recovery.progress()
        if self._adoptions.waiting:
            self._adoptions.progress()

    def _begin_pacing(self, verdict: Accepted) -> None:
        """Answers that begin with this step, or after it."""
        for stream, flags in verdict.flagged:
            if stream.pace_s and stream.phase is Phase.ANSWERING and not flags & FINISHED:
                # Without reasoning the first token is the answer's, and was shown just now.
                self._pacer.begin(stream, 1 if flags & PREFILL_DONE else 0)

    def _release(self, verdict: Accepted) -> None:
        """Prompts that are computed make room for others."""
        if self.fair is not None:
            for stream, flags in verdict.flagged:
                if flags & (PREFILL_DONE | FINISHED):
                    self.fair.release(stream.handle)

    def _send_apart(self, instance_id: str, step: worker_pb2.StepOutputs, verdict: Accepted) -> None:
        """What is kept goes by its answer's log, what is paced by the pacer, the rest at once."""
        keep = verdict.keep
        handles, counts, flags = list(step.handles), list(step.counts), list(step.flags)
        accepted = [entry for entry in range(len(handles)) if keep is None or keep[entry]]
        apart = [at for at, entry in enumerate(accepted) if self._goes_apart(handles[entry])]
        try:
            frames = list(step.frames) if keep is None else filter_outputs(list(step.frames), keep)
            rest, messages = split_outputs(frames, apart) if apart else (frames, [])
        except (msgspec.DecodeError, ValueError, IndexError) as error:
            self._unreadable(instance_id, step, verdict, error)
            return
        if len(apart) < len(accepted):
            self._output.send(rest)
        if not apart:
            return
        ends = list(accumulate(counts))
        for at, message in zip(apart, messages, strict=True):
            entry = accepted[at]
            handle, flag, end = handles[entry], flags[entry], ends[entry]
            if self._answers is not None and self._answers.keeps(handle):
                self._answers.put(handle, message, list(step.token_ids[end - counts[entry] : end]), flag)
            else:
                self._pacer.put(handle, message, counts[entry], bool(flag & FINISHED))

    def _goes_apart(self, handle: int) -> bool:
        if self._answers is not None and self._answers.keeps(handle):
            return True
        return self._pacer.paces(handle)

    def _send_kept(
        self, instance_id: str, step: worker_pb2.StepOutputs, verdict: Accepted, keep: list[bool]
    ) -> None:
        try:
            self._output.send(filter_outputs(list(step.frames), keep))
        except (msgspec.DecodeError, ValueError) as error:
            self._unreadable(instance_id, step, verdict, error)

    def _unreadable(
        self, instance_id: str, step: worker_pb2.StepOutputs, verdict: Accepted, error: Exception
    ) -> None:
        """Accepted by its columns, but the outputs themselves cannot be had: an honest error, not a gap."""
        log.error("unreadable outputs from %s: %s", instance_id, error)
        finished = {stream.handle: stream for stream, _ in verdict.flagged}
        keep = verdict.keep or [True] * len(step.handles)
        for handle, kept in zip(step.handles, keep, strict=True):
            stream = self._table.get(handle) or finished.get(handle)
            if kept and stream is not None:
                self._workers.send(instance_id, abort([handle]))
                self._give_up(stream, "unreadable outputs")

    def _on_rejected(self, instance_id: str, verdict: Accepted) -> None:
        stale = [
            handle
            for handle, reason in verdict.rejected
            if reason is Reject.UNKNOWN or reason is Reject.NOT_OWNER
        ]
        if stale:
            # Abort names a request by its handle alone; who does not own it has nothing to keep of it.
            self._workers.send(instance_id, abort(stale))
        if verdict.failed:
            self._observer.failed(verdict.failed, instance_id)
            self._recovery.failed(verdict.failed, instance_id)

    def _on_missing(self, instance_id: str, reply: worker_pb2.HeldReply) -> None:
        """Streams that the instance does not have, though it owns them: nobody runs them."""
        for handle, epoch in zip(reply.missing_handles, reply.missing_epochs, strict=False):
            stream = self._table.get(handle)
            if stream is None or stream.owner != instance_id or stream.epoch != epoch:
                continue
            log.error("%s does not have %s any more", instance_id, stream.request_id)
            self._table.fail(stream)
            self._observer.missing(stream, instance_id)
            self._recovery.failed([stream], instance_id)

    def _on_turned_away(self, instance_id: str, rejected: worker_pb2.RequestRejected) -> None:
        stream = self._table.get(rejected.handle)
        if stream is None or stream.owner != instance_id or stream.epoch != rejected.epoch:
            return
        if rejected.code == worker_pb2.REJECT_CODE_BUSY:
            self._observer.turned_away(instance_id)
            self._recovery.turned_away(stream, instance_id)
        else:
            # Its own doing, and no other instance can do better.
            self._not_again(stream)
            self._end_with_error(stream, Refusal(400, f"The request ends: {rejected.reason}."))
            self._observer.gave_up(stream, rejected.reason)

    # ---- from dispatch and recovery

    def on_placed(self, stream: Stream, placed: Placed, seconds: float) -> None:
        """Under way."""
        self._observer.placed(stream, placed, seconds)

    def on_handed_back(self, stream: Stream, instance_id: str) -> None:
        """See RelocationSink."""
        self._observer.handed_back(stream, instance_id)

    def on_unplaced(self, stream: Stream, reason: str, seconds: float) -> None:
        """Nothing could take it in time."""
        if self._table.is_live(stream):
            log.warning("%s found no instance in %.1f s: %s", stream.request_id, seconds, reason)
            self._end_with_error(stream, CANNOT_GO_ON if stream.accepted else NO_INSTANCE)
            self._observer.gave_up(stream, reason)

    def on_refused(self, stream: Stream, reason: str) -> None:
        """Its first token would come too late."""
        if self._table.is_live(stream):
            log.info("%s is too late: %s", stream.request_id, reason)
            self._turn_down(stream, OVERLOADED)

    def _give_up(self, stream: Stream, reason: str) -> None:
        log.warning("%s given up: %s", stream.request_id, reason)
        self._not_again(stream)
        self._end_with_error(stream, Refusal(500, f"The request ends: {reason}."))
        self._observer.gave_up(stream, reason)

    def _not_again(self, stream: Stream) -> None:
        """Nobody may resume it."""
        if self._answers is not None:
            self._answers.failed(stream.handle)

    def _end_with_error(self, stream: Stream, refusal: Refusal) -> None:
        self._close(stream)
        if self._answers is not None:
            self._answers.ended(stream.handle)
        frames = _error(stream.request_id, refusal)
        if self._pacer.paces(stream.handle):
            self._pacer.put(stream.handle, frames, 0, True)
        else:
            self._output.send(frames)


def _error(request_id: str, refusal: Refusal) -> list[bytes]:
    """A message that ends a request."""
    error = EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR, stop_reason=refusal.encode())
    return encode_outputs([error], [request_id])
