"""Connects the API server, the workers and the modules that decide about streams.

Every message from either side arrives here and is passed to the module that owns the decision: which tokens
are accepted (streams.py), where a stream runs (dispatch.py), what happens when an instance is lost
(recovery.py), and who owns a migrated stream (adopt.py). What they accept is forwarded from here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final

import msgspec

from frontend_svc.adapters import SharedAdapters
from frontend_svc.admission import (
    CANNOT_GO_ON,
    CONGESTED,
    NO_INSTANCE,
    NOT_HANDLED,
    OVERLOADED,
    STOPPING,
    TENANT_FULL,
    TOO_MANY_REQUESTS,
    Refusal,
)
from frontend_svc.adopt import Adoptions
from frontend_svc.answers.calls import ANSWER_HEADER, METHODS
from frontend_svc.answers.coordinator import AnswerCoordinator, RunRequest
from frontend_svc.api_server.spec import ADAPTER_CALLS
from frontend_svc.dispatch import Dispatcher, Relocations
from frontend_svc.fair_gate import FairGate
from frontend_svc.links import Loss, WorkerLinks, abort_message, request_bytes
from frontend_svc.liveness import Liveness
from frontend_svc.names import NamedOutput
from frontend_svc.observer import StreamObserver
from frontend_svc.pacing import Pacer
from frontend_svc.placement import Placement
from frontend_svc.recovery import Recovery
from frontend_svc.settings import Limits, WaitLimits
from frontend_svc.streams import (
    FINISHED,
    PREFILL_DONE,
    MalformedStep,
    Reject,
    Requirements,
    StepVerdict,
    Stream,
    StreamTable,
)
from frontend_svc.utilities import UtilityCalls
from tailrace.adapter_versions import AdapterVersions
from tailrace.cluster import Phase
from tailrace.request_ids import MAX_BYTES, chosen_by_client, is_own_id, own_id, problem_with
from tailrace.service.message_stream import MIN_MESSAGE_BYTES
from tailrace.telemetry.incidents import unreadable
from tailrace.tenancy.fair_queue import TenantQueueFull
from tailrace.tenancy.share import SHARE_HEADER, Share
from tailrace.v1 import worker_pb2
from tailrace.wire import (
    EngineCoreOutput,
    FinishReason,
    RequestHead,
    UtilityCall,
    check_outputs,
    encode_outputs,
    filter_outputs,
    for_engines,
    read_request,
    split_outputs,
    trace_context,
    without_statistics,
)
from tailrace.wire.cache_keys import read_cache_keys

log = logging.getLogger(__name__)

# A request whose outputs could not be sent more often than this ends.
MAX_CONGESTED: Final = 3
# Bytes that the API server has not read: beyond the first, new requests are refused; beyond the second,
# streams end, so that the rest can go on.
UNREAD_FULL_BYTES: Final = 64 << 20
UNREAD_MAX_BYTES: Final = 512 << 20


class Carrier:
    """Handle every message of the API server, the worker links and the dispatcher."""

    def __init__(
        self,
        table: StreamTable,
        workers: WorkerLinks,
        placement: Placement,
        output: NamedOutput,
        observer: StreamObserver,
        pacer: Pacer,
        wait_limits: WaitLimits,
        limits: Limits,
        on_full: Callable[[bool], None],
        pace_s: float = 0.0,
        answers: AnswerCoordinator | None = None,
        adapters: SharedAdapters | None = None,
    ) -> None:
        """Wire the parts together; nothing starts before the first message.

        `on_full(full)` is called with whether new requests would be refused with 429. `pace_s`: seconds per
        token at which answers are shown if the request does not set it; 0 shows tokens as they are generated.
        `answers`: None if no answers are kept; `adapters`: None if those that users load are not shared.
        """
        self._table = table
        self._workers = workers
        self._output = output
        self._pacer = pacer
        self._pace_s = pace_s
        self._answers = answers
        self._shared_adapters = adapters
        self._limits = limits
        self._on_full = on_full
        self._observer = observer
        self._dispatch = Dispatcher(
            table, placement, workers, observer, wait_limits, self._on_unplaced, self._on_refused
        )
        self.fair_gate: FairGate | None = None
        if limits.fair_backlog_tokens:
            self.fair_gate = FairGate(
                limits.fair_backlog_tokens,
                limits.max_waiting,
                wait_limits.place_s,
                self._dispatch.start_after_wait,
                self._refuse,
                observer.turn_waited,
            )
        self._recovery = Recovery(table, self._dispatch, workers, self._give_up, observer.engine_died)
        self._relocations = Relocations(table, placement, workers, self._dispatch, observer)
        self._adoptions = Adoptions(table, workers, observer.adopted, placement.may_run)
        self._liveness = Liveness(table, workers)
        # What the attached instances last said of their engines.
        self.engines: dict[str, worker_pb2.EngineState] = {}
        self._utilities = UtilityCalls(workers, output.send)
        self._adapters = AdapterVersions()
        self.reply = output.send
        if answers is not None:
            answers.bind(self)

    async def close(self) -> None:
        """Cancel all work in progress."""
        if self.fair_gate is not None:
            self.fair_gate.close()
        self._adoptions.close()
        self._pacer.close()
        self._utilities.close()
        if self._answers is not None:
            await self._answers.close()
        await self._relocations.close()
        await self._dispatch.close()

    # ---- from the API server

    def on_add(self, frames: Sequence[bytes]) -> None:
        """Admit or refuse a new request. Raise msgspec.DecodeError if the frames are not a request."""
        head = read_request(frames)
        before = self._table.find(head.request_id)
        try:
            self._add(head, frames)
        except Exception:  # a request that nobody foresaw fails alone
            log.exception("%s cannot be handled", head.request_id[:MAX_BYTES])
            stream = self._table.find(head.request_id)
            if stream is not None and stream is not before:
                self._output.drop(stream.request_id)
                self._abort(stream)
            self._observer.refused(NOT_HANDLED.status)
            self._output.send(_error(head.request_id, NOT_HANDLED))

    def _add(self, head: RequestHead, frames: Sequence[bytes]) -> None:
        chosen = head.external_req_id
        request_id = head.request_id if chosen is None or is_own_id(head.request_id) else own_id(chosen)
        problem = _problem_with_ids(head) or head.wrong_extra
        refusal = Refusal(400, problem) if problem else self._refusal(frames)
        if refusal is not None:
            log.warning("%s refused: %s", request_id[:MAX_BYTES], refusal.message)
            self._observer.refused(refusal.status)
            self._output.send(_error(head.request_id, refusal))
            return
        headers = head.trace_headers or {}
        run_request: RunRequest | None = None
        if self._answers is not None and (run := headers.get(ANSWER_HEADER)) is not None:
            joining = self._answers.join_run(run, head.request_id)
            if isinstance(joining, Refusal):
                self._output.send(_error(head.request_id, joining))
                return
            run_request = joining
            if run_request.progress.finished:
                self._answers.deliver(run_request)
                return
        try:
            stream = self._table.open(
                request_id,
                for_engines(frames, request_id),
                head.prompt_tokens,
                head.max_tokens or 0,
                time.monotonic(),
                head.request_id,
            )
        except ValueError:
            log.exception("refused a request")
            return
        if stream.name != stream.request_id:
            self._output.add(stream.request_id, stream.name)
        if head.adapter or not head.generates:
            stream.requirements = Requirements(head.generates, head.adapter)
        if head.adapter:
            stream.adapter_version = self._adapter_version(frames)
        if head.pace_tpot_ms is not None:
            stream.pace_s = head.pace_tpot_ms / 1e3
        else:
            stream.pace_s = self._pace_s
        traceparent = trace_context(headers).get("traceparent", "")
        self._observer.arrived(stream, traceparent, chosen or "")
        if run_request is not None:
            self._resume(stream, run_request)
        if self.fair_gate is None or stream.accepted:
            self._dispatch.start(stream)
        else:
            self._wait_for_turn(self.fair_gate, stream, head)

    def _wait_for_turn(self, fair: FairGate, stream: Stream, head: RequestHead) -> None:
        share = Share.decode((head.trace_headers or {}).get(SHARE_HEADER, ""))
        try:
            fair.enqueue(stream, share, head.priority)
        except TenantQueueFull:
            self._refuse(stream, TENANT_FULL)

    def _refuse(self, stream: Stream, refusal: Refusal) -> None:
        """End a stream that was never submitted to an instance."""
        log.info("%s refused: %s", stream.request_id, refusal.message)
        self._end_with_error(stream, refusal)
        self._observer.stream_refused(stream, refusal.status)

    def _resume(self, stream: Stream, run_request: RunRequest) -> None:
        """Restore a stream that was already running earlier, perhaps on another front end."""
        assert self._answers is not None
        progress = run_request.progress
        self._table.restore(stream, progress.token_ids, progress.flags, progress.model)
        self._answers.deliver(run_request)
        self._answers.attach_stream(stream, run_request)
        if stream.phase is Phase.ANSWERING:
            stream.first_answer_s, stream.first_answer_index = stream.arrived_s, stream.accepted
            self._pacer.begin(stream, 0)

    def _adapter_version(self, frames: Sequence[bytes]) -> str:
        read = read_cache_keys(frames)
        adapter = None if read is None else read.keys.adapter
        return "" if adapter is None else self._adapters.of(adapter[1])

    def tick(self) -> None:
        """Run the periodic checks. Called every half second."""
        self._liveness.tick(time.monotonic())
        self._recovery.tick()
        if self._answers is not None:
            self._answers.tick()
        unread_bytes = self._output.unread_bytes
        if unread_bytes > UNREAD_MAX_BYTES:
            self._end_newest_streams(unread_bytes)
        self._on_full(len(self._table) >= self._limits.max_streams or unread_bytes > UNREAD_FULL_BYTES)

    def _end_newest_streams(self, unread_bytes: int) -> None:
        """End half of the streams: the API server has not read so many bytes, and memory is bounded."""
        streams = list(self._table)
        ended = streams[len(streams) // 2 :]
        log.warning("the API server has not read %d bytes: %d streams end", unread_bytes, len(ended))
        for stream in ended:
            self._dispatch.cancel(stream)
            if stream.owner is not None:
                self._workers.send(stream.owner, abort_message([stream.handle]))
            self._end_with_error(stream, CONGESTED)
            self._observer.gave_up(stream, "the API server does not read")

    def _refusal(self, frames: Sequence[bytes]) -> Refusal | None:
        """Return why a new request cannot be accepted, or None."""
        if len(self._table) >= self._limits.max_streams:
            self._on_full(True)
            return TOO_MANY_REQUESTS
        waiting = 0 if self.fair_gate is None else len(self.fair_gate)
        if len(self._dispatch) + waiting >= self._limits.max_unplaced:
            return NO_INSTANCE
        size = request_bytes(frames, 0)
        if size <= MIN_MESSAGE_BYTES:
            return None
        # With no instance attached there is no limit to check: the request waits for one.
        limits = [self._workers.max_message_bytes(instance_id) for instance_id in self._workers.attached()]
        if limits and size > max(limits):
            return Refusal(413, f"The request has {size} bytes; instances accept at most {max(limits)}.")
        return None

    def on_abort(self, request_ids: Sequence[str]) -> None:
        """Free these requests, by the API server's names, on whichever instances they run."""
        for name in request_ids:
            self._pacer.drop(name)
            stream = self._table.find(name)
            if stream is None:
                continue
            self._output.drop(stream.request_id)
            self._abort(stream)
        if self._adoptions.waiting:
            self._adoptions.check_pending()

    def _abort(self, stream: Stream) -> None:
        self._dispatch.cancel(stream)
        self._close(stream)
        if stream.owner is not None:
            self._workers.send(stream.owner, abort_message([stream.handle]))
        if self._answers is not None:
            self._answers.stream_ended(stream.handle)
        self._observer.aborted(stream)

    def _close(self, stream: Stream) -> None:
        self._table.close(stream)
        if self.fair_gate is not None:
            self.fair_gate.release(stream.handle)

    def on_utility(self, call: UtilityCall, frames: Sequence[bytes]) -> None:
        """Handle a call of an engine-core method."""
        if self._answers is not None and call.method in METHODS:
            self._answers.handle_call(call)
        elif self._shared_adapters is not None and call.method in ADAPTER_CALLS:
            self._shared_adapters.handle_call(call, self._output.send)
        else:
            self._utilities.call(call, frames)

    # ---- ApiServerSink, called for kept answers

    def send_output(self, handle: int, frames: Sequence[bytes], tokens: int, last: bool) -> None:
        """See ApiServerSink."""
        self._pacer.put(handle, frames, tokens, last)

    def end_request(self, request_id: str, refusal: Refusal) -> None:
        """See ApiServerSink."""
        self._pacer.drop(request_id)
        stream = self._table.find(request_id)
        if stream is not None:
            self._abort(stream)
        self._output.send(_error(request_id, refusal))

    # ---- from instances

    def on_attached(self, instance_id: str, hello: worker_pb2.WorkerHello) -> None:
        """Use a newly attached instance for everything that waits for one."""
        self._recovery.attached(instance_id, hello.incarnation)
        self._utilities.instance_attached(instance_id)
        self._dispatch.fleet_changed()

    def fleet_changed(self) -> None:
        """Have streams that wait for an instance try again after a membership change."""
        self._dispatch.fleet_changed()

    def on_lost(self, instance_id: str, loss: Loss) -> None:
        """Restart the lost instance's streams elsewhere."""
        self._utilities.instance_lost(instance_id)
        self._liveness.lost(instance_id)
        self.engines.pop(instance_id, None)
        self._observer.lost(self._recovery.instance_lost(instance_id, loss), instance_id, loss.reason)
        if self._adoptions.waiting:
            self._adoptions.check_pending()

    def on_process_gone(self, instance_id: str) -> None:
        """Record that the process of a lost instance has ended."""
        self._recovery.process_gone(instance_id)

    def on_message(self, instance_id: str, message: worker_pb2.AttachDown) -> None:
        """Handle any message of an attached instance except hello and draining."""
        match message.WhichOneof("body"):
            case "outputs":
                self._on_step(instance_id, message.outputs)
            case "adopt":
                self._adoptions.request(instance_id, message.adopt)
            case "ownership_query":
                self._adoptions.answer_ownership_query(instance_id, message.ownership_query)
            case "hand_back":
                self._relocations.hand_back(instance_id, message.hand_back)
            case "utility":
                self._utilities.result(instance_id, message.utility)
            case "held_reply":
                self._on_held_reply(instance_id, message.held_reply)
            case "taken":
                self._table.confirm_on_engine(instance_id, message.taken.handle, message.taken.epoch)
            case "rejected":
                self._on_submit_rejected(instance_id, message.rejected)
            case "heartbeat":
                said = message.heartbeat
                self._liveness.heartbeat_received(instance_id, said.steps, said.running, time.monotonic())
                if said.HasField("engine"):
                    self.engines[instance_id] = said.engine
            case body:
                log.warning("unexpected %s from %s", body, instance_id)

    def _on_step(self, instance_id: str, step: worker_pb2.StepOutputs) -> None:
        try:
            verdict = self._table.accept(instance_id, step)
        except MalformedStep as error:
            # It is unknown which tokens belong to which stream, so everything that the instance owns restarts
            # on a new connection.
            log.error("malformed outputs from %s: %s", instance_id, error)
            self._workers.reconnect(instance_id, f"malformed outputs: {error}")
            return
        self._liveness.step_received(instance_id, step.step, time.monotonic())
        if self._answers is not None:
            self._answers.instance_heard()
        try:
            if self._pacer or self._answers:
                self._send_split(instance_id, step, verdict)
            elif verdict.keep is None:
                self._output.send(_readable(instance_id, list(step.frames)))
            elif any(verdict.keep):
                kept = filter_outputs(list(step.frames), verdict.keep)
                self._output.send(_readable(instance_id, kept))
        except Exception as error:  # noqa: BLE001 - whatever a worker's bytes lead to
            self._fail_unreadable(instance_id, step, verdict, error)
        if verdict.flagged:
            self._begin_pacing(verdict)
            self._release(verdict)
        self._observer.accepted(verdict)
        if verdict.rejected:
            self._on_rejected_outputs(instance_id, verdict)
        if self._recovery.watching:
            self._recovery.check_progress()
        if self._adoptions.waiting:
            self._adoptions.check_pending()

    def _begin_pacing(self, verdict: StepVerdict) -> None:
        """Start pacing streams whose answer begins with or after this step."""
        for stream, flags in verdict.flagged:
            if stream.pace_s and stream.phase is Phase.ANSWERING and not flags & FINISHED:
                # Without reasoning, the first token already belongs to the answer and has just been sent.
                self._pacer.begin(stream, 1 if flags & PREFILL_DONE else 0)

    def _release(self, verdict: StepVerdict) -> None:
        """Free the admission backlog of prompts that have been prefilled."""
        if self.fair_gate is not None:
            for stream, flags in verdict.flagged:
                if flags & (PREFILL_DONE | FINISHED):
                    self.fair_gate.release(stream.handle)

    def _send_split(self, instance_id: str, step: worker_pb2.StepOutputs, verdict: StepVerdict) -> None:
        """Send a step's outputs one by one where needed: kept answers to their log, paced ones to the
        pacer."""
        keep = verdict.keep
        handles, counts, flags = list(step.handles), list(step.counts), list(step.flags)
        accepted = [entry for entry in range(len(handles)) if keep is None or keep[entry]]
        separate = [at for at, entry in enumerate(accepted) if self._sent_separately(handles[entry])]
        if not accepted:
            return
        frames = list(step.frames) if keep is None else filter_outputs(list(step.frames), keep)
        frames = _readable(instance_id, frames)
        forwarded, messages = split_outputs(frames, separate) if separate else (frames, [])
        if len(separate) < len(accepted):
            self._output.send(forwarded)
        if not separate:
            return
        ends = list(accumulate(counts))
        for at, message in zip(separate, messages, strict=True):
            entry = accepted[at]
            handle, flag, end = handles[entry], flags[entry], ends[entry]
            if self._answers is not None and self._answers.is_kept(handle):
                self._answers.append_output(
                    handle, message, list(step.token_ids[end - counts[entry] : end]), flag
                )
            else:
                self._pacer.put(handle, message, counts[entry], bool(flag & FINISHED))

    def _sent_separately(self, handle: int) -> bool:
        if self._answers is not None and self._answers.is_kept(handle):
            return True
        return self._pacer.is_paced(handle)

    def _fail_unreadable(
        self, instance_id: str, step: worker_pb2.StepOutputs, verdict: StepVerdict, error: Exception
    ) -> None:
        """End streams whose tokens were accepted but whose output payload cannot be decoded.

        The tokens are lost, so ending with an error is the only alternative to a gap in the answer.
        """
        unreadable("outputs of a worker", instance_id, error)
        finished = {stream.handle: stream for stream, _ in verdict.flagged}
        keep = verdict.keep or [True] * len(step.handles)
        for handle, kept in zip(step.handles, keep, strict=True):
            stream = self._table.get(handle) or finished.get(handle)
            if kept and stream is not None:
                self._workers.send(instance_id, abort_message([handle]))
                self._give_up(stream, "unreadable outputs")

    def _on_rejected_outputs(self, instance_id: str, verdict: StepVerdict) -> None:
        stale = [
            handle
            for handle, reason in verdict.rejected
            if reason is Reject.UNKNOWN or reason is Reject.NOT_OWNER
        ]
        if stale:
            # An abort carries only the handle; an instance that does not own the stream must keep nothing of
            # it.
            self._workers.send(instance_id, abort_message(stale))
        if verdict.failed:
            self._observer.failed(verdict.failed, instance_id)
            self._recovery.failed(verdict.failed, instance_id)

    def _on_held_reply(self, instance_id: str, reply: worker_pb2.HeldReply) -> None:
        """Restart streams that an instance owns but does not have any more."""
        for handle, epoch in zip(reply.missing_handles, reply.missing_epochs, strict=False):
            stream = self._table.get(handle)
            if stream is None or stream.owner != instance_id or stream.epoch != epoch:
                continue
            log.error("%s no longer has %s", instance_id, stream.request_id)
            self._table.fail(stream)
            self._observer.missing(stream, instance_id)
            self._recovery.failed([stream], instance_id)

    def _on_submit_rejected(self, instance_id: str, rejected: worker_pb2.RequestRejected) -> None:
        stream = self._table.get(rejected.handle)
        if stream is None or stream.owner != instance_id or stream.epoch != rejected.epoch:
            return
        if rejected.code == worker_pb2.REJECT_CODE_BUSY:
            self._observer.instance_busy(instance_id)
            self._recovery.instance_busy(stream, instance_id)
        elif rejected.code == worker_pb2.REJECT_CODE_CONGESTED:
            stream.congested += 1
            if stream.congested <= MAX_CONGESTED:
                self._observer.instance_busy(instance_id)
                self._recovery.instance_busy(stream, instance_id)
            else:
                self._end_with_error(stream, CONGESTED)
                self._observer.gave_up(stream, rejected.reason)
        elif rejected.code == worker_pb2.REJECT_CODE_FAILED:
            self._table.fail(stream)
            self._observer.failed([stream], instance_id)
            self._recovery.failed([stream], instance_id, rejected.reason)
        else:
            # The request itself is at fault, so no other instance would accept it.
            self._forbid_resume(stream)
            self._end_with_error(stream, Refusal(400, f"The request failed: {rejected.reason}."))
            self._observer.gave_up(stream, rejected.reason)

    # ---- from dispatch and recovery

    def _on_unplaced(self, stream: Stream, reason: str, seconds: float) -> None:
        """End a stream that no instance could take in time."""
        if self._table.is_live(stream):
            log.warning("%s found no instance in %.1f s: %s", stream.request_id, seconds, reason)
            self._end_with_error(stream, CANNOT_GO_ON if stream.accepted else NO_INSTANCE)
            self._observer.gave_up(stream, reason)

    def _on_refused(self, stream: Stream, reason: str) -> None:
        """End a stream that the scheduler refuses because its first token would be too late."""
        if self._table.is_live(stream):
            log.info("%s is too late: %s", stream.request_id, reason)
            self._refuse(stream, OVERLOADED)

    def _give_up(self, stream: Stream, reason: str) -> None:
        log.warning("%s given up: %s", stream.request_id, reason)
        self._forbid_resume(stream)
        self._end_with_error(stream, Refusal(500, f"The request failed: {reason}."))
        self._observer.gave_up(stream, reason)

    def end_streams(self) -> None:
        """End all streams with an error: this front end is about to exit.

        Kept answers are left: their clients get the rest from another front end, and an error would be the
        end.
        """
        if self._answers is not None:
            return
        for stream in self._table:
            self._dispatch.cancel(stream)
            if stream.owner is not None:
                self._workers.send(stream.owner, abort_message([stream.handle]))
            self._end_with_error(stream, STOPPING)
            self._observer.gave_up(stream, "the front end stops")

    def _forbid_resume(self, stream: Stream) -> None:
        """Make sure that no client can resume this stream's answer."""
        if self._answers is not None:
            self._answers.stream_failed(stream.handle)

    def _end_with_error(self, stream: Stream, refusal: Refusal) -> None:
        self._close(stream)
        if self._answers is not None:
            self._answers.stream_ended(stream.handle)
        self._pacer.put(stream.handle, _error(stream.request_id, refusal), 0, True)


def _problem_with_ids(head: RequestHead) -> str:
    """Return what is wrong with the ids that a client chose, and with the API server's; empty if nothing is.

    The Python API server checks them itself, before the response begins.
    """
    for name, chosen in (
        ("request_id", chosen_by_client(head.external_req_id or "")),
        ("request_id", "" if is_own_id(head.request_id) else head.request_id[MAX_BYTES // 4 :]),
        ("session_id", head.session_id or ""),
    ):
        if problem := problem_with(chosen):
            return f"{name} {problem}."
    return ""


def _readable(instance_id: str, frames: list[bytes]) -> list[bytes]:
    """Return a worker's outputs as API servers can read them, if need be without its statistics.

    Raise msgspec.DecodeError if they cannot be read otherwise either.
    """
    try:
        check_outputs(frames)
    except msgspec.DecodeError as error:
        frames = without_statistics(frames)
        check_outputs(frames)
        unreadable("outputs of a worker", instance_id, f"statistics: {error}")
    return frames


def _error(request_id: str, refusal: Refusal) -> list[bytes]:
    """Encode a message that ends a request with an error."""
    error = EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR, stop_reason=refusal.encode())
    return encode_outputs([error], [request_id])
