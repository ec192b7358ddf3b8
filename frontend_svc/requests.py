"""A request's way through the fleet. One coroutine tells it: `Requests._serve`.

A request is admitted, waits for its tenant's turn, is placed on an instance and runs there. When it loses the
instance it is placed again, until it ends. Its tokens do not pass here (streams.py accepts them, outputs.py
sends them on), and a migration changes its owner while it runs (adopt.py). Which streams of a lost instance
are placed again at once, later or never is decided for all of them together (recovery.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from frontend_svc.admission import (
    CANNOT_GO_ON,
    CONGESTED,
    NO_INSTANCE,
    NOT_HANDLED,
    OVERLOADED,
    TOO_MANY_REQUESTS,
    Refusal,
    Refused,
)
from frontend_svc.answers.calls import ANSWER_HEADER
from frontend_svc.answers.coordinator import RunRequest
from frontend_svc.fair_gate import FairGate
from frontend_svc.links import Outbox, abort_message, request_bytes
from frontend_svc.observer import StreamObserver
from frontend_svc.outputs import Outputs
from frontend_svc.placement import Chosen, InstanceChooser, NoneChosen
from frontend_svc.settings import Settings
from frontend_svc.streams import Requirements, Stream, StreamTable
from frontend_svc.tenants import Sender, TenantUsage
from tailrace.cluster import Phase
from tailrace.model_identity import AdapterVersions
from tailrace.request_ids import MAX_BYTES, chosen_by_client, is_own_id, own_id, problem_with
from tailrace.service.message_stream import MIN_MESSAGE_BYTES
from tailrace.service.tasks import cancel, task_error
from tailrace.telemetry.incidents import guarded, loop_failed, loop_named
from tailrace.tenancy.keys import SHARE_HEADER, Share
from tailrace.v1 import worker_pb2
from tailrace.wire.cache_keys import read_cache_keys
from tailrace.wire.requests import RequestHead, for_engines, read_request, trace_context

log = logging.getLogger(__name__)

_SERVING: Final = loop_named("serving requests")
_MOVING: Final = loop_named("moving requests")

# Seconds between attempts while no instance can take the stream and the fleet does not change.
_RETRY_S: Final = 0.5
# Seconds for which an instance gets no request after rejecting one as busy.
BUSY_S: Final = 0.5


def _none_forbidden() -> frozenset[str]:
    return frozenset()


@dataclass(frozen=True, slots=True)
class Where:
    """Where a request that has no instance may be placed, as recovery.py decides.

    `avoid`: instances to use only if there is no other. `forbidden`: returns the instances that must not be
    used at the moment of the call; called before each attempt.
    """

    avoid: frozenset[str] = frozenset()
    forbidden: Callable[[], frozenset[str]] = _none_forbidden


@dataclass(frozen=True, slots=True)
class Returned:
    """An instance returns a request that it has no KV of, or no time to migrate."""

    instance_id: str
    epoch: int


@dataclass(slots=True, eq=False)
class _Serving:
    """What `_serve` is told from outside about one request."""

    task: asyncio.Task[None]
    # What to do next, if it was ordered.
    order: Where | Returned | None = None
    ordered: asyncio.Event = field(default_factory=asyncio.Event)


class _NoInstance(Exception):
    """No instance took the request within its wait limit, for this reason."""


class Requests:
    """Serve every request of one front end from its admission to its end."""

    def __init__(
        self,
        table: StreamTable,
        chooser: InstanceChooser,
        outbox: Outbox,
        outputs: Outputs,
        observer: StreamObserver,
        settings: Settings,
        on_full: Callable[[bool], None],
        tenants: TenantUsage | None = None,
    ) -> None:
        """Serve nothing yet. `on_full(full)` is called with whether new requests would get 429. `tenants`:
        None if the API server knows them, or nobody has any."""
        self._table = table
        self._chooser = chooser
        self._outbox = outbox
        self._outputs = outputs
        self._observer = observer
        self._wait_limits = settings.wait_limits
        self._limits = limits = settings.limits
        self._on_full = on_full
        self._pace_s = settings.pace_s
        self._adapters = AdapterVersions()
        self.fair_gate: FairGate | None = None
        if limits.fair_backlog_tokens:
            self.fair_gate = FairGate(
                limits.fair_backlog_tokens,
                limits.max_waiting,
                self._wait_limits.place_s,
                observer.turn_waited,
            )
        self._tenants = tenants
        if tenants is not None and self.fair_gate is not None:
            tenants.full = self.fair_gate.full
        self._serving: dict[int, _Serving] = {}
        # Requests that wait for their turn or for an instance.
        self._unplaced: set[int] = set()
        # Set at the next change.
        self._fleet_changed = asyncio.Event()
        # Instances that rejected a request as busy, each with the monotonic time until which it gets none.
        self._busy: dict[str, float] = {}

    # ---- the way

    async def _serve(self, stream: Stream, share: Share, priority: int) -> None:
        """Serve one request until it ends; whoever ends it (`_close`) cancels this."""
        try:
            if self.fair_gate is not None and not stream.accepted:
                # Until its tenant's turn has come; Refused if it does not come in time.
                await self.fair_gate.turn(stream, share, priority)
            await self._place(stream, Where())
            while True:
                # It runs. An order comes when recovery.py has taken it from a lost instance, so that later
                # outputs of that are stale, or when its instance returns it.
                match await self._next_order(stream):
                    case Where() as where:
                        await self._place(stream, where)
                    case Returned() as returned:
                        await self._move(stream, returned)
        except Refused as refused:
            self._refuse(stream, refused.refusal)
        except _NoInstance as error:
            self._end(stream, CANNOT_GO_ON if stream.accepted else NO_INSTANCE, str(error))
        except Exception as error:  # noqa: BLE001 - a bug must not leave the client waiting forever
            loop_failed(_SERVING, stream.request_id, error)
            self._free(stream)
            self._end(stream, NOT_HANDLED, "internal error")

    async def _next_order(self, stream: Stream) -> Where | Returned:
        serving = self._serving[stream.handle]
        while (order := serving.order) is None:
            serving.ordered.clear()
            await serving.ordered.wait()
        serving.order = None
        return order

    async def _place(self, stream: Stream, where: Where) -> None:
        """Ask for an instance until the request is queued for one. Raise _NoInstance or Refused."""
        while True:
            changed = self._fleet_changed
            chosen = await self._choose(stream, where)
            placing_s = time.monotonic() - stream.placing_since_s
            if isinstance(chosen, Chosen):
                if chosen.instance_id not in where.forbidden() and self._submit(stream, chosen):
                    self._observer.placed(stream, chosen, placing_s)
                    return
                reason = f"{chosen.instance_id} cannot take it now"
            elif chosen.final:
                log.info("%s is refused: %s", stream.request_id, chosen.reason)
                raise Refused(OVERLOADED)
            else:
                reason = chosen.reason
            begun = stream.accepted or stream.left_engine
            wait_s = self._wait_limits.resume_s if begun else self._wait_limits.place_s
            if placing_s >= wait_s:
                log.warning("%s found no instance in %.1f s: %s", stream.request_id, placing_s, reason)
                raise _NoInstance(reason)
            try:
                async with asyncio.timeout(min(_RETRY_S, wait_s - placing_s)):
                    await changed.wait()
            except TimeoutError:
                pass

    async def _move(self, stream: Stream, returned: Returned) -> None:
        """Move a request off a draining instance, by recomputing it on another one.

        It stays with its owner until another instance is chosen, and if there is none; then it is taken from
        the owner in one step, so that late outputs carry an old epoch.
        """
        began_s, leaving = time.monotonic(), returned.instance_id
        if not _owns(returned, stream):
            return
        chosen: Chosen | NoneChosen | None = None
        with guarded(_MOVING, stream.request_id):
            chosen = await self._chooser.choose(stream, frozenset({leaving}))
        if not _owns(returned, stream):
            return
        if not isinstance(chosen, Chosen) or chosen.instance_id == leaving:
            log.debug("%s stays on %s, which returns it", stream.request_id, leaving)
            return
        self._table.orphan(stream)
        self._outbox.send(leaving, abort_message([stream.handle]))
        self._observer.returned(stream, leaving)
        if self._submit(stream, chosen):
            self._observer.placed(stream, chosen, time.monotonic() - began_s)
        else:
            self.place_again(stream, Where(frozenset({leaving})))

    async def _choose(self, stream: Stream, where: Where) -> Chosen | NoneChosen:
        never = where.forbidden() | self._unsuitable(stream)
        chosen = await self._chooser.choose(stream, where.avoid | never)
        if isinstance(chosen, NoneChosen) and not chosen.final and where.avoid - never:
            chosen = await self._chooser.choose(stream, where.forbidden() | self._unsuitable(stream))
        if isinstance(chosen, NoneChosen) and not chosen.final:
            never = where.forbidden() | self._unsuitable(stream)
            return self._chooser.last_resort(stream, never) or chosen
        return chosen

    def _unsuitable(self, stream: Stream) -> frozenset[str]:
        """Return instances that were busy a moment ago or whose message limit is below the request's size."""
        now_s = time.monotonic()
        self._busy = {instance: until_s for instance, until_s in self._busy.items() if until_s > now_s}
        size = request_bytes(stream.frames, stream.accepted)
        if size <= MIN_MESSAGE_BYTES:
            return frozenset(self._busy)
        outbox = self._outbox
        small = (
            instance_id for instance_id in outbox.attached() if outbox.max_message_bytes(instance_id) < size
        )
        return frozenset(self._busy).union(small)

    def _submit(self, stream: Stream, chosen: Chosen) -> bool:
        """Submit an unowned stream to the instance; return False if it cannot be sent now."""
        submit = worker_pb2.Submit(
            handle=stream.handle,
            request_id=stream.request_id,
            epoch=stream.epoch,
            frames=stream.frames,
            output_token_ids=stream.token_ids,
            traceparent=stream.traceparent,
            suspect=time.monotonic() < stream.exclusive_until_s,
            pull=chosen.pull,
            adapter_version=stream.adapter_version,
        )
        if stream.first_answer_s != stream.arrived_s:
            # Of an answer that came from another front end, the arrival here says nothing.
            submit.waited_s = time.monotonic() - stream.arrived_s
        if stream.first_answer_s is not None:
            submit.answer_tokens = stream.accepted - stream.first_answer_index
            submit.answering_s = time.monotonic() - stream.first_answer_s
        if not self._outbox.send(chosen.instance_id, worker_pb2.AttachUp(submit=submit)):
            return False
        self._table.assign(stream, chosen.instance_id)
        if stream.pace_s is None:
            stream.pace_s = chosen.pace_s
        self._unplaced.discard(stream.handle)
        if not stream.accepted:
            stream.model = self._chooser.model_of(chosen.instance_id)
        return True

    # ---- its begin

    def admit(self, frames: Sequence[bytes]) -> None:
        """Admit or refuse a new request. Raise msgspec.DecodeError if the frames are not a request."""
        head = read_request(frames)
        before = self._table.find(head.request_id)
        try:
            self._admit(head, frames)
        except Exception:  # a request that nobody foresaw fails alone
            log.exception("%s cannot be handled", head.request_id[:MAX_BYTES])
            stream = self._table.find(head.request_id)
            if stream is not None and stream is not before:
                self._abort(stream)
            self._observer.refused(NOT_HANDLED.status)
            self._outputs.send_error(head.request_id, NOT_HANDLED)

    def _admit(self, head: RequestHead, frames: Sequence[bytes]) -> None:
        chosen = head.external_req_id
        sender: Sender | None = None
        unknown: Refusal | None = None
        if self._tenants is not None:
            try:
                sender = self._tenants.sender(head)
                chosen = sender.name
            except Refused as refused:
                unknown = refused.refusal
        request_id = head.request_id if chosen is None or is_own_id(head.request_id) else own_id(chosen)
        problem = _problem_with_ids(head) or head.wrong_extra
        refusal = unknown or (Refusal(400, problem) if problem else self._refusal(frames))
        if refusal is not None:
            log.warning("%s refused: %s", request_id[:MAX_BYTES], refusal.message)
            self._observer.refused(refusal.status)
            self._outputs.send_error(head.request_id, refusal)
            return
        headers = head.trace_headers or {}
        run_request = self._outputs.join_run(headers.get(ANSWER_HEADER), head.request_id)
        if isinstance(run_request, Refusal):
            self._observer.refused(run_request.status)
            self._outputs.send_error(head.request_id, run_request)
            return
        if run_request is not None and run_request.progress.finished:
            self._outputs.deliver_run(run_request)
            return
        try:
            stream = self._table.open(
                request_id,
                for_engines(frames, request_id, None if sender is None else sender.fields(head)),
                head.prompt_tokens,
                head.max_tokens or 0,
                time.monotonic(),
                head.request_id,
            )
        except ValueError:
            log.exception("refused a request")
            return
        stream.placing_since_s = stream.arrived_s
        stream.pace_s = self._pace_s if head.pace_tpot_ms is None else head.pace_tpot_ms / 1e3
        if head.adapter or not head.generates:
            stream.requirements = Requirements(head.generates, head.adapter)
        if head.adapter:
            stream.adapter_version = self._adapter_version(frames)
        self._outputs.begin(stream)
        self._observer.arrived(stream, trace_context(headers).get("traceparent", ""), chosen or "")
        if run_request is not None:
            self._resume(stream, run_request)
        self._unplaced.add(stream.handle)
        share, priority = _share_of(head), head.priority
        if sender is not None and self._tenants is not None:
            self._tenants.begin(stream, sender.tenant)
            share, priority = sender.share(), sender.tenant.priority
        task = asyncio.create_task(self._serve(stream, share, priority), name=f"serve {stream.request_id}")
        self._serving[stream.handle] = _Serving(task)
        task.add_done_callback(task_error)

    def _refusal(self, frames: Sequence[bytes]) -> Refusal | None:
        """Return why a new request cannot be accepted, or None."""
        if len(self._table) >= self._limits.max_streams:
            self._on_full(True)
            return TOO_MANY_REQUESTS
        if len(self._unplaced) >= self._limits.max_unplaced:
            return NO_INSTANCE
        size = request_bytes(frames, 0)
        if size <= MIN_MESSAGE_BYTES:
            return None
        # With no instance attached there is no limit to check: the request waits for one.
        limits = [self._outbox.max_message_bytes(instance_id) for instance_id in self._outbox.attached()]
        if limits and size > max(limits):
            return Refusal(413, f"The request has {size} bytes; instances accept at most {max(limits)}.")
        return None

    def _resume(self, stream: Stream, run_request: RunRequest) -> None:
        """Restore a stream that was already running earlier, perhaps on another front end."""
        progress = run_request.progress
        self._table.restore(stream, progress.token_ids, progress.flags, progress.model)
        self._outputs.resume(stream, run_request)
        if stream.phase is Phase.ANSWERING:
            stream.first_answer_s, stream.first_answer_index = stream.arrived_s, stream.accepted

    def _adapter_version(self, frames: Sequence[bytes]) -> str:
        read = read_cache_keys(frames)
        adapter = None if read is None else read.keys.adapter
        return "" if adapter is None else self._adapters.of(adapter[1])

    # ---- what it is told while it runs

    def place_again(self, stream: Stream, where: Where) -> None:
        """Place a stream that has lost its instance; its wait limit starts now."""
        stream.placing_since_s = time.monotonic()
        self._unplaced.add(stream.handle)
        self._order(stream, where)

    def place_elsewhere(self, stream: Stream, busy: str, where: Where) -> None:
        """Place a stream that the instance `busy` rejected, within what is left of its wait limit. One that
        ran there was not being placed any more: its wait limit starts now."""
        if stream.reached_engine:
            stream.placing_since_s = time.monotonic()
        self._busy[busy] = time.monotonic() + BUSY_S
        self._unplaced.add(stream.handle)
        self._order(stream, where)

    def returned(self, instance_id: str, message: worker_pb2.Returned) -> None:
        """Move the streams that an instance returns; ignore those that it does not own."""
        for handle, epoch in zip(message.handles, message.epochs, strict=False):
            stream, returned = self._table.get(handle), Returned(instance_id, epoch)
            if stream is not None and _owns(returned, stream):
                self._order(stream, returned)

    def fleet_changed(self) -> None:
        """Have requests that wait for an instance try again now."""
        # One that waits now, or is asking a scheduler, hears of it; the next change has an event of its own.
        self._fleet_changed.set()
        self._fleet_changed = asyncio.Event()

    def _order(self, stream: Stream, order: Where | Returned) -> None:
        """Tell `_serve` what to do next. The newest order counts: a request that was returned, and whose
        instance is then lost, is placed; without an instance none can be returned."""
        serving = self._serving[stream.handle]
        serving.order = order
        serving.ordered.set()

    # ---- its end

    def finished(self, stream: Stream) -> None:
        """Forget a stream whose last output was accepted."""
        self._close(stream)

    def prefilled(self, stream: Stream) -> None:
        """Free the admission backlog of a prompt that has been prefilled."""
        if self.fair_gate is not None:
            self.fair_gate.release(stream.handle)

    def abort(self, name: str) -> None:
        """Free the request of this name of the API server's, on whichever instance it runs."""
        self._outputs.drop(name)
        stream = self._table.find(name)
        if stream is not None:
            self._abort(stream)

    def end_request(self, name: str, refusal: Refusal) -> None:
        """End the request of this name with an error, wherever it runs."""
        self.abort(name)
        self._outputs.send_error(name, refusal)

    def _refuse(self, stream: Stream, refusal: Refusal) -> None:
        """End a stream that was never submitted to an instance."""
        log.info("%s refused: %s", stream.request_id, refusal.message)
        self._close(stream)
        self._outputs.end(stream, refusal)
        self._observer.stream_refused(stream, refusal.status)

    def give_up(self, stream: Stream, reason: str) -> None:
        """End a stream that fails wherever it runs; its answer must not be run again."""
        log.warning("%s given up: %s", stream.request_id, reason)
        self.end_for_good(stream, Refusal(500, f"The request failed: {reason}."), reason)

    def end_for_good(self, stream: Stream, refusal: Refusal, reason: str) -> None:
        """End a stream with this error; its answer must not be run again."""
        self._outputs.forbid_resume(stream)
        self._end(stream, refusal, reason)

    def end_congested(self, stream: Stream, reason: str) -> None:
        """End a stream whose outputs are made faster than they are read."""
        self._end(stream, CONGESTED, reason)

    def end_each(self, streams: Iterable[Stream], refusal: Refusal, reason: str) -> None:
        """End streams with this error, wherever they run."""
        for stream in streams:
            self._free(stream)
            self._end(stream, refusal, reason)

    async def close(self) -> None:
        """Serve nothing any more."""
        if self.fair_gate is not None:
            self.fair_gate.close()
        await cancel(*(serving.task for serving in self._serving.values()))
        self._serving.clear()

    def _abort(self, stream: Stream) -> None:
        self._free(stream)
        self._close(stream)
        self._outputs.aborted(stream)
        self._observer.aborted(stream)

    def _end(self, stream: Stream, refusal: Refusal, reason: str) -> None:
        self._close(stream)
        self._outputs.end(stream, refusal)
        self._observer.gave_up(stream, reason)

    def _free(self, stream: Stream) -> None:
        """Have the stream's instance free it."""
        if stream.owner is not None:
            self._outbox.send(stream.owner, abort_message([stream.handle]))

    def _close(self, stream: Stream) -> None:
        if self._tenants is not None:
            self._tenants.end(stream)
        self._table.close(stream)
        self._unplaced.discard(stream.handle)
        if self.fair_gate is not None:
            self.fair_gate.release(stream.handle)
        serving = self._serving.pop(stream.handle, None)
        if serving is not None and serving.task is not asyncio.current_task():
            serving.task.cancel()


def _owns(returned: Returned, stream: Stream) -> bool:
    return stream.owner == returned.instance_id and stream.epoch == returned.epoch


def _share_of(head: RequestHead) -> Share:
    headers: Mapping[str, str] = head.trace_headers or {}
    return Share.decode(headers.get(SHARE_HEADER, ""))


def _problem_with_ids(head: RequestHead) -> str:
    """Return what is wrong with the ids that a client chose, and with the API server's; empty if nothing is.

    The Python API server checks them itself, before the response begins.
    """
    return problem_with(
        (
            ("request_id", chosen_by_client(head.external_req_id or "")),
            ("request_id", "" if is_own_id(head.request_id) else head.request_id[MAX_BYTES // 4 :]),
            ("session_id", head.session_id or ""),
        )
    )
