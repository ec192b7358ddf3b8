"""The target of a migration: one import, from the source's snapshot to the first token of its own.

copying   can be cancelled and times out; every failure drops the reservation and ends the export, whereupon
          the source resumes. If the source itself is lost, its front end places the request again, as every
          request of an instance that is lost
adopting  the front end has been asked; only its reply decides. Without one in time, the target disconnects
          it, whereupon it recovers what it has here, and the source asks it who owns the request
over      committed, or aborted
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Final

from tailrace.handover import BACKGROUND, LIVE, SETTLE_S, TELL_SOURCE_S, Handover, TransferMode
from tailrace.messages import PHASE_NUMBERS, TRANSFER_MODES
from tailrace.service.tasks import cancel, run_to_completion, task_error
from tailrace.telemetry.incidents import loop_failed, loop_named
from tailrace.v1 import types_pb2, worker_pb2
from worker_agent.engine.base import Exported, RequestKey, Submission
from worker_agent.engine.errors import EngineRefusal
from worker_agent.frontends import FrontEnd, failed_here
from worker_agent.kv.address import (
    BlockTransfer,
    KvTransferError,
    addresses_of,
)
from worker_agent.migration.copying import (
    ABORTED,
    COPY_FAILURES,
    GONE,
    Abort,
    Copying,
    Paused,
    Round,
    abort_of,
    handover_to,
    plan_of,
    replay_submission,
    stop_to_replay,
    told_why,
)
from worker_agent.migration.export_call import SourceLink, SourceLost, exported_of, tickets_of
from worker_agent.migration.source import MigrationParts

log = logging.getLogger(__name__)

COMMITTED: Final = types_pb2.MIGRATION_STATE_COMMITTED
UNKNOWN: Final = types_pb2.MIGRATION_STATE_UNKNOWN
_ENDS: Final = frozenset({ABORTED, COMMITTED, GONE, UNKNOWN})
_LOOP: Final = loop_named("imports")
# The migration service limits imports; this only keeps a faulty one from filling the worker.
_IMPORTS_MAX: Final = 32
# Imports that have ended, of which a migration service may still ask how.
_ENDED_MAX: Final = 1_024


class Import:
    """Import one request."""

    def __init__(self, parts: MigrationParts, request: worker_pb2.ImportRequest, source: SourceLink) -> None:
        self.migration_id: Final = request.migration_id
        self.request_id: Final = request.request_id
        self._parts = parts
        self._request = request
        self._source = source
        self._plan = plan_of(request, parts.settings.import_timeout_s)
        self._events: list[worker_pb2.ImportEvent] = []
        self._changed = asyncio.Event()
        # While it copies: ending it early aborts the import.
        self._copying: asyncio.Timeout | None = None
        self._transfer: BlockTransfer | None = None
        self._cancelled = ""
        # Whether the request has left its source, or is not to be moved any more.
        self._gone = False
        # How it moves; known once the source has opened its export.
        self._handover: Handover = LIVE
        # Whether the engine may have a reservation to drop; and whether it has reserved blocks, or runs it.
        self._in_engine = False
        self.reserved = False
        self._front_end: FrontEnd | None = None
        # Set once the front end is to be asked.
        self._adopting = False
        self._adopt_reply: worker_pb2.AdoptReply | None = None
        # Set once there is a reply or there will be none.
        self._adopt_settled = asyncio.Event()
        # Whether the front end has accepted and then aborted the request.
        self._aborted = False
        # A submission of the same request that arrived meanwhile and replaces the import.
        self._successor: Submission | None = None
        self.key: RequestKey | None = None
        self.over = asyncio.Event()
        # Set once the front end has accepted.
        self.committed = False

    @property
    def last_event(self) -> worker_pb2.ImportEvent:
        """Return the event with its end, once it is over; one that says so if it failed without any."""
        if self._events and self._events[-1].state in _ENDS:
            return self._events[-1]
        state = COMMITTED if self.committed else ABORTED
        return worker_pb2.ImportEvent(state=state, reason="the target failed")

    # ---- called by others

    async def events(self) -> AsyncIterator[worker_pb2.ImportEvent]:
        """Yield all events from the beginning; ends when the import is over."""
        sent = 0
        while True:
            while sent < len(self._events):
                yield self._events[sent]
                sent += 1
            if self.over.is_set():
                return
            self._changed.clear()
            await self._changed.wait()

    def cancel(self, reason: str, gone: bool = False) -> bool:
        """Abort unless the front end has been asked already; return whether it was aborted.

        `gone`: because the request is not to be moved any more.
        """
        if self._adopting or self.over.is_set():
            return False
        if not self._cancelled:
            self._cancelled, self._gone = reason, gone
        if self._copying is not None and not self._copying.expired():
            self._copying.reschedule(asyncio.get_running_loop().time())
        return True

    def answer(self, reply: worker_pb2.AdoptReply) -> None:
        """Take the front end's AdoptReply."""
        if self._adopting:
            self._adopt_reply = self._adopt_reply or reply
            self._adopt_settled.set()

    def supersede_by(self, submission: Submission) -> bool:
        """End the import in favour of a submission of the same request, which follows once it is over.

        Return False if the import is over already.
        """
        if self.over.is_set():
            return False
        self._successor = submission
        self.cancel("the front end submitted the request anew", gone=True)
        return True

    def request_aborted(self, key: RequestKey) -> None:
        """Handle an abort of a request, perhaps of this one."""
        if self._successor is not None and self._successor.key == key:
            self._successor = None
        if self.key == key and not self.cancel("the request was aborted", gone=True):
            # One sent before the reply concerns what was here earlier: else the reply is a refusal.
            self._aborted = self._adopt_reply is not None

    def concerns(self, key: RequestKey) -> bool:
        """Return whether it moves this request, or keeps a submission of it."""
        return self.key == key or (self._successor is not None and self._successor.key == key)

    def front_end_gone(self, client: int) -> None:
        """Handle a front end that has detached."""
        if self._successor is not None and self._successor.key.client == client:
            self._successor = None
        if self.key is not None and self.key.client == client:
            self.cancel("its front end is gone", gone=True)

    # ---- the way

    async def run(self) -> None:
        """Open the export, copy the request in rounds, and commit: afterwards exactly one end has it, or none
        if it has ended meanwhile.

        What fails before the commit, also the source or the time, becomes an Abort (`abort_of`).
        """
        async with AsyncExitStack() as ending:
            # These follow from the last to the first, however it ends.
            ending.callback(self._close)
            ending.push(self._report)
            ending.push_async_callback(self._close_transfer)
            ending.push_async_exit(self._give_up)
            self._raise_if_cancelled()
            try:
                # Not a task of its own: it would keep what failed in it, with the frames and so this import.
                async with asyncio.timeout(self._plan.room_wait_s + self._plan.timeout_s) as self._copying:
                    opened = await self._open()
                    paused = await self._copy(opened)
            except COPY_FAILURES as error:
                late = f"not finished within {self._plan.timeout_s:g} s of getting room"
                raise abort_of(error, self._cancelled or late, self._parts.metrics) from error
            finally:
                self._copying = None
            self._raise_if_cancelled()
            # From here on only the front end decides.
            self._adopting = True
            await run_to_completion(self._commit(opened, paused))

    async def _open(self) -> worker_pb2.ExportOpened:
        """Get the source's snapshot, and reserve room here."""
        command = worker_pb2.ExportOpen(
            migration_id=self.migration_id,
            request_id=self.request_id,
            source_instance_id=self._request.source_instance_id,
            target_instance_id=self._parts.own.instance_id,
            kv_addresses=[address.message() for address in self._parts.puller.addresses],
        )
        event = await self._source.ask(worker_pb2.ExportCommand(open=command))
        if event.WhichOneof("body") != "opened":
            raise SourceLost("the source did not open the export")
        opened = event.opened
        handover = self._handover = handover_to(self._parts.info, opened)
        if opened.epoch != self._request.from_epoch:
            raise Abort(f"the request is in epoch {opened.epoch}, not {self._request.from_epoch}")
        front_end = self._front_end = self._parts.front_ends.by_id(opened.frontend_id)
        if front_end is None:
            raise Abort(f"front end {opened.frontend_id} is not attached to this instance")
        key = self.key = RequestKey(front_end.client, opened.handle)
        exported = exported_of(opened, key)
        if handover.mode is TransferMode.REPLAY:
            await self._parts.engine.replay_check(exported, key)
        else:
            await self._reserve(exported, key)
        self._parts.metrics.kv_held_blocks += self._held()
        self._emit(
            worker_pb2.ImportEvent(
                state=types_pb2.MIGRATION_STATE_OPEN,
                phase=opened.phase,
                way=TRANSFER_MODES[handover.mode],
                way_reason=handover.reason,
                held_blocks=self._held(),
                held_bytes=self._held() * self._parts.info.kv_shape.block_bytes,
            )
        )
        await self._parts.faults.hold("import:open")
        return opened

    def _held(self) -> int:
        """Return the number of leading blocks that this engine's prefix cache had. Raise EngineRefusal."""
        return self._parts.engine.import_cached(self.request_id) if self.reserved else 0

    async def _reserve(self, exported: Exported, key: RequestKey) -> None:
        """Reserve room on the engine, waiting for it if the plan says so. Raise EngineRefusal or Abort."""
        engine, epoch, wait_s = self._parts.engine, self._request.epoch, self._plan.room_wait_s
        if not wait_s:
            await run_to_completion(self._open_import(exported, key))
            return
        self._in_engine = True
        try:
            async with asyncio.timeout(wait_s):
                await engine.import_queue(exported, key, epoch)
        except TimeoutError:
            raise Abort(f"target: no room within {wait_s:g} s") from None
        self.reserved = True

    async def _open_import(self, exported: Exported, key: RequestKey) -> None:
        await self._parts.engine.import_open(exported, key, self._request.epoch)
        self._in_engine = self.reserved = True

    async def _copy(self, opened: worker_pb2.ExportOpened) -> Paused:
        """Copy until the source has paused the request and nothing is left to copy."""
        parts = self._parts
        if self._handover.mode is TransferMode.REPLAY:
            return await stop_to_replay(self._source, parts.faults)
        puller = parts.puller
        sources, tickets = addresses_of(opened.kv_addresses, puller.addresses), tickets_of(opened)
        if not sources:
            raise KvTransferError(f"{len(opened.kv_addresses)} endpoints there, {len(puller.addresses)} here")
        try:
            transfer = self._transfer = await puller.connect(self.request_id, sources, tickets)
        except KvTransferError:
            # Of an export that has ended, a source knows no ticket, and answers nothing.
            await told_why(self._source)
            raise
        copying = Copying(
            parts.engine,
            transfer,
            self._source,
            parts.faults,
            self.request_id,
            self._round_done,
            parts.link if self._request.reason in BACKGROUND else None,
            self._held(),
        )
        return await copying.run(opened, self._plan)

    def _round_done(self, done: Round) -> None:
        self._parts.incoming.add(done.message.bytes, done.ended_s - done.began_s)
        self._parts.spans.round_done(self._request.traceparent, done)
        self._emit(worker_pb2.ImportEvent(state=done.state, round=done.message))

    async def _commit(self, opened: worker_pb2.ExportOpened, paused: Paused) -> None:
        """Ask the front end, and run the request here once it has accepted. Raise Abort if it has not."""
        next_index = len(opened.output_token_ids) + len(paused.pause.new_output_token_ids)
        await self._parts.faults.hold("import:adopt")
        await self._ask_front_end(
            worker_pb2.Adopt(
                migration_id=self.migration_id,
                handle=opened.handle,
                request_id=self.request_id,
                from_epoch=self._request.from_epoch,
                epoch=self._request.epoch,
                next_index=next_index,
            )
        )
        # From now on the request belongs to this instance alone: whatever fails, it must run here, or the
        # front end must be told that it does not.
        self.committed = True
        self._parts.metrics.imports["committed"] += 1
        runs = await self._activate(opened, paused, next_index)
        self._report_commit(opened, paused, next_index, runs)
        await self._end_source(True, "")

    async def _ask_front_end(self, adopt: worker_pb2.Adopt) -> None:
        """Return once the front end has accepted. Raise Abort if it has refused, or if nobody knows.

        Meanwhile the import can neither be cancelled nor time out: only the end of the stream to the front
        end decides otherwise, and a front end that does not reply is disconnected.
        """
        front_end, timeout_s = self._front_end, self._parts.settings.adopt_timeout_s
        assert front_end is not None
        if not front_end.send(worker_pb2.AttachDown(adopt=adopt)):
            # Not sent, so it cannot have been accepted.
            raise Abort("the front end is gone")
        watch = asyncio.create_task(self._watch(front_end), name="adoption")
        try:
            async with asyncio.timeout(timeout_s):
                await self._adopt_settled.wait()
        except TimeoutError:
            pass
        finally:
            watch.cancel()
        reply = self._adopt_reply
        if reply is None:
            if not front_end.closed.is_set():
                front_end.disconnect(f"did not answer an adoption within {timeout_s:g} s")
                self._parts.front_ends.detach(front_end)
            # It may have accepted or not, and recovers the request in either case. Only the front end knows,
            # and the source asks it: reporting an abort here could make two owners.
            self._source.drop()
            raise Abort(f"the front end is gone: {front_end.reason}", UNKNOWN)
        if not reply.accepted:
            raise Abort(reply.reason or "refused by the front end", GONE if reply.gone else ABORTED)

    async def _watch(self, front_end: FrontEnd) -> None:
        await front_end.closed.wait()
        self._adopt_settled.set()

    async def _activate(self, opened: worker_pb2.ExportOpened, paused: Paused, next_index: int) -> bool:
        """Run the request on this engine, or tell the front end that it does not run here, and return
        False."""
        front_end, key, epoch = self._front_end, self.key, self._request.epoch
        assert front_end is not None and key is not None
        try:
            await self._parts.faults.hold("import:adopted")
            if self._parts.front_ends.by_client(key.client) is not front_end:
                # It recovers the request with all others, and nobody would abort it here.
                raise EngineRefusal("its front end is gone")
            if self._aborted:
                raise EngineRefusal("it was aborted")
            running = self._parts.running.add(
                key, self.request_id, opened.frontend_id, epoch, opened.traceparent, paused.request_arrived_s
            )
            if paused.answer_pace is not None:
                running.pace.go_on(paused.answer_pace, next_index, paused.arrived_s)
            if self._handover.mode is TransferMode.REPLAY:
                self._parts.engine.submit(replay_submission(opened, paused, key, self.request_id, epoch))
            else:
                await self._parts.engine.import_activate(self.request_id)
        except Exception as error:
            if isinstance(error, EngineRefusal):
                log.warning("%s was adopted but does not run: %s", self.request_id, error)
            else:
                log.exception("%s was adopted but does not run", self.request_id)
            # The front end has it recomputed elsewhere.
            front_end.send(failed_here(self.request_id, key.handle, epoch, next_index))
            self._parts.running.remove(key)
            await self._parts.engine.import_drop(self.request_id)
            return False
        return True

    def _report_commit(
        self, opened: worker_pb2.ExportOpened, paused: Paused, next_index: int, runs: bool
    ) -> None:
        phase = self._phase(opened)
        pause_s = time.monotonic() - paused.since_s
        interval_ms = paused.pause.token_interval_ms
        if runs:
            # Otherwise it stands still until another instance has recomputed it.
            self._parts.metrics.pause_seconds.observe(pause_s)
            self._parts.events.changed(self.request_id)
            self._parts.spans.paused(self._request.traceparent, paused.since_s, pause_s)
        self._emit(
            worker_pb2.ImportEvent(
                state=COMMITTED,
                pause_ms=pause_s * 1000,
                pause_steps=pause_s * 1000 / interval_ms if interval_ms > 0 else 0.0,
                step_wait_ms=paused.pause.waited_s * 1000,
                phase=phase,
                tokens=next_index,
            )
        )
        log.info(
            "%s adopted at token %d after a pause of %.1f ms", self.request_id, next_index, pause_s * 1000
        )

    def _phase(self, opened: worker_pb2.ExportOpened) -> types_pb2.Phase.ValueType:
        """Return its current phase, which may have changed since the export was opened."""
        for request in self._parts.engine.request_stats([self.request_id]):
            return PHASE_NUMBERS[request.phase]
        return opened.phase

    # ---- how it ends

    def _raise_if_cancelled(self) -> None:
        if self._cancelled:
            raise Abort(self._cancelled)

    async def _give_up(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Drop everything unless it is committed; the source resumes if there is one."""
        if not self.committed:
            # Without an Abort, the worker is stopping, or has a bug.
            reason = str(error) if isinstance(error, Abort) else "the target failed"
            await run_to_completion(self._drop(reason))

    async def _drop(self, reason: str) -> None:
        try:
            if self._in_engine:
                self._in_engine = self.reserved = False
                await self._parts.engine.import_drop(self.request_id)
        finally:
            await self._end_source(False, reason)

    async def _end_source(self, committed: bool, reason: str) -> None:
        try:
            async with asyncio.timeout(TELL_SOURCE_S):
                await self._source.end(committed, reason)
        except TimeoutError:
            self._source.drop()

    async def _close_transfer(self) -> None:
        if self._transfer is not None:
            await run_to_completion(self._transfer.close())

    def _report(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Tell the migration service of an abort, and return whether there was one."""
        if not isinstance(error, Abort):
            return False
        state = GONE if self._gone and error.state == ABORTED else error.state
        self._parts.metrics.imports["aborted"] += 1
        log.info("%s: import aborted: %s", self.request_id, error)
        self._emit(worker_pb2.ImportEvent(state=state, reason=str(error)))
        return True

    def _close(self) -> None:
        """End it for all who wait, and submit the request if it was submitted meanwhile."""
        self._source.drop()
        # No await in between: a submission is either handed over here or refused by `supersede_by`.
        self.over.set()
        self._changed.set()
        successor, self._successor = self._successor, None
        if successor is None:
            return
        if self.committed and self.key is not None:
            self._parts.engine.abort([self.key])
        self._parts.resubmit(successor)

    def _emit(self, event: worker_pb2.ImportEvent) -> None:
        self._events.append(event)
        self._changed.set()


class ImportRefused(Exception):
    """An import that cannot begin; the message says why."""


class Imports:
    """Run each import in a task of its own that outlives the migration service's call, and pass on what
    reaches it from outside."""

    def __init__(self, parts: MigrationParts, connect: Callable[[str, float], SourceLink]) -> None:
        """`connect(address, seconds)` opens an export at a source, with this deadline."""
        self._parts = parts
        self._connect = connect
        self._running: dict[Import, asyncio.Task[None]] = {}
        # The last event of each import that has ended, by migration.
        self._ended: OrderedDict[str, worker_pb2.ImportEvent] = OrderedDict()
        # Why no import may begin; empty if they may.
        self._refusal = ""
        parts.front_ends.on_gone(self._front_end_gone)

    def __len__(self) -> int:
        return len(self._running)

    @property
    def with_room(self) -> int:
        """Return the number of imports whose KV is reserved and so included in the KV usage that the
        scheduler sees."""
        return sum(incoming.reserved for incoming in self._running)

    def start(self, request: worker_pb2.ImportRequest) -> Import:
        """Begin an import. Raise ImportRefused."""
        if self._refusal:
            raise ImportRefused(self._refusal)
        if refusal := self._parts.own.refusal(request.target_instance_id, request.target_incarnation):
            raise ImportRefused(refusal)
        if not request.migration_id or not request.request_id or not request.source_address:
            raise ImportRefused("migration_id, request_id and source_address must be given")
        if request.epoch <= request.from_epoch:
            raise ImportRefused(f"epoch {request.epoch} is not after {request.from_epoch}")
        if len(self._running) >= _IMPORTS_MAX:
            raise ImportRefused(f"{_IMPORTS_MAX} imports are running")
        if self._named(request.request_id) is not None or self._migration(request.migration_id) is not None:
            raise ImportRefused(f"{request.request_id} is being imported already")
        timeout_s = request.timeout_s or self._parts.settings.import_timeout_s
        timeout_s += max(0.0, request.room_wait_s) + SETTLE_S
        source = self._connect(request.source_address, timeout_s)
        incoming = Import(self._parts, request, source)
        task = asyncio.create_task(incoming.run(), name=f"import {request.request_id}")
        self._running[incoming] = task
        task.add_done_callback(lambda done: self._done(incoming, done))
        return incoming

    def reserved(self, request_id: str) -> bool:
        """Return whether the engine has reserved blocks for a request that is being imported."""
        incoming = self._named(request_id)
        return incoming is not None and incoming.reserved

    def refuse(self, reason: str) -> None:
        """Begin no more imports, and abort those that can be aborted: their sources resume."""
        self._refusal = reason
        for incoming in self._running:
            incoming.cancel(reason)

    async def cancel(self, migration_id: str) -> worker_pb2.ImportEvent | None:
        """Abort an import unless it is being committed, wait for its end and return its last event; None if
        there was no such import, or if it ended long ago."""
        incoming = self._migration(migration_id)
        if incoming is not None:
            incoming.cancel("cancelled by the migration service")
            await incoming.over.wait()
            return incoming.last_event
        return self._ended.get(migration_id)

    async def close(self) -> None:
        """Cancel all."""
        await cancel(*self._running.values())

    # ---- messages of the front end

    def handle_adopt_reply(self, reply: worker_pb2.AdoptReply) -> None:
        """Pass on an AdoptReply."""
        incoming = self._migration(reply.migration_id)
        if incoming is not None:
            incoming.answer(reply)

    def supersede_by(self, submission: Submission) -> bool:
        """Keep a submission until an import of the same request has ended; return False if there is none."""
        incoming = self._named(submission.request_id)
        return incoming is not None and incoming.supersede_by(submission)

    def request_aborted(self, key: RequestKey) -> None:
        """Cancel imports of a request that the front end has aborted."""
        for incoming in self._running:
            incoming.request_aborted(key)

    def concerns(self, key: RequestKey) -> bool:
        """Return whether this request is being imported, or was submitted and waits for the end of an
        import."""
        return any(incoming.concerns(key) for incoming in self._running)

    def _front_end_gone(self, client: int) -> None:
        for incoming in self._running:
            incoming.front_end_gone(client)

    def _named(self, request_id: str) -> Import | None:
        return next((incoming for incoming in self._running if incoming.request_id == request_id), None)

    def _migration(self, migration_id: str) -> Import | None:
        return next((incoming for incoming in self._running if incoming.migration_id == migration_id), None)

    def _done(self, incoming: Import, task: asyncio.Task[None]) -> None:
        del self._running[incoming]
        self._ended[incoming.migration_id] = incoming.last_event
        while len(self._ended) > _ENDED_MAX:
            self._ended.popitem(last=False)
        if (error := task_error(task)) is not None:
            loop_failed(_LOOP, incoming.request_id, error)
