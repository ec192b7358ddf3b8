"""The source of a migration: one export, from open to release or resume.

The request is in exactly one of these states, and leaves it by a release or a resume, unless it ends first or
its front end is gone:

    open     runs, its full blocks pinned            target lost, idle or aborting -> resume
    paused   does not run                            committed or released         -> release
                                                     target aborting               -> resume
                                                     target lost or silent         -> ask the front end

A paused source cannot know whether a target that is gone has been accepted: the front end can, which sends
`Release` when it accepts one. So the source asks, and repeats that while the front end is attached; if that
is gone too, the request has ended with it. The front end may still accept the target after it has told the
source to go on; then its `Release` ends what was resumed here.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Final

from tailrace.messages import PHASE_NUMBERS
from tailrace.perf.transfer_rate import TransferRate
from tailrace.service.tasks import cancel, run_to_completion, task_error
from tailrace.telemetry.incidents import loop_failed, loop_named
from tailrace.v1 import worker_pb2
from worker_agent.engine.base import Engine, EngineInfo, Exported, ExportedPause, RequestKey, Submission
from worker_agent.engine.errors import EngineRefusal, Gone
from worker_agent.faults import Faults
from worker_agent.frontends import FrontEnds
from worker_agent.kv.address import (
    BlockPuller,
    BlockSession,
    BlockSource,
    KvTransferError,
    addresses_of,
    kv_layout,
)
from worker_agent.metrics import WorkerMetrics
from worker_agent.migration.copying import LinkBudget, identity_message
from worker_agent.migration.export_call import (
    Broken,
    Ended,
    Item,
    Lease,
    Owned,
    Released,
    block_identities,
)
from worker_agent.registration import Addressee
from worker_agent.reports import PhaseEvents
from worker_agent.running_requests import RunningRequest, RunningRequests
from worker_agent.settings import WorkerSettings
from worker_agent.spans import TransferSpans

log = logging.getLogger(__name__)

_OPEN_S: Final = 5.0
# An export ends whose target sends no command and requests no blocks for this long before the pause.
_IDLE_S: Final = 30.0
OWNERSHIP_S: Final = 2.0
# An attached front end that leaves so many queries unanswered is disconnected.
_OWNERSHIP_QUERIES_MAX: Final = 5
_LOOP: Final = loop_named("exports")


@dataclass(frozen=True, slots=True)
class MigrationParts:
    """Parts of the worker that exports and imports use."""

    own: Addressee
    engine: Engine
    info: EngineInfo
    # Sends the blocks of exports.
    blocks: BlockSource
    # Fetches those of imports.
    puller: BlockPuller
    front_ends: FrontEnds
    running: RunningRequests
    events: PhaseEvents
    metrics: WorkerMetrics
    faults: Faults
    spans: TransferSpans
    settings: WorkerSettings
    # Submits a request that had to wait for the end of an import.
    resubmit: Callable[[Submission], None]
    # Limits background transfers to here.
    link: LinkBudget = field(default_factory=LinkBudget)
    # Rate of incoming KV, including waits for the link budget.
    incoming: TransferRate = field(default_factory=TransferRate)


class ExportOutcome(enum.Enum):
    """What happens to the request here."""

    RELEASE = "release"
    RESUME = "resume"
    # Finished, aborted, or without its front end: nothing can go on, and what is pinned is freed.
    GONE = "gone"


class NotAnExport(Exception):
    """The stream does not begin with an export of this instance; the message says why."""


class Export:
    """Export one request."""

    def __init__(self, parts: MigrationParts, lease: Lease) -> None:
        self._parts = parts
        # The stream to the target. Commands come from its inbox, and so does what the front end says.
        self.lease = lease
        self._request_id = ""
        self._target_instance_id = ""
        # None for a target with other parallel sizes, which cannot use the KV.
        self._session: BlockSession | None = None
        self._paused_s: float | None = None
        self._outcome, self._reason = ExportOutcome.RESUME, ""
        # Output tokens when the export was opened.
        self._opened_tokens = 0
        # Set once the engine has opened the export.
        self.key: RequestKey | None = None
        self.epoch = 0
        # Set once the outcome is final: later signals are ignored.
        self.decided = False

    @property
    def paused(self) -> bool:
        """Return whether the request is paused."""
        return self._paused_s is not None

    @property
    def releases(self) -> bool:
        """Return whether it is decided that the request has moved."""
        return self.decided and self._outcome is ExportOutcome.RELEASE

    async def run(self) -> None:
        """Open the export, send blocks in rounds, pause, and hand the request over, or go on with it.

        Never leaves a request paused or pinned.
        """
        async with AsyncExitStack() as ending:
            # These follow from the last to the first, however it ends.
            ending.callback(self.lease.close)
            try:
                opening = await self._read_open()
                exported = await run_to_completion(self._parts.engine.export_open(self._request_id))
            except (NotAnExport, EngineRefusal) as error:
                self._fail(str(error), gone=isinstance(error, Gone))
                return
            self.key, self.epoch = exported.key, exported.epoch
            self._opened_tokens = len(exported.output_token_ids)
            ending.push_async_callback(self._settle)
            try:
                self._outcome = await self._open(opening, exported) or await self._follow_commands()
            except KvTransferError as error:
                self._reason = str(error)

    async def _read_open(self) -> worker_pb2.ExportOpen:
        """Return the first command. Raise NotAnExport if it does not open an export of this instance."""
        command = await self.lease.inbox.next(_OPEN_S)
        if not isinstance(command, worker_pb2.ExportCommand) or not command.HasField("open"):
            raise NotAnExport("the first command must open the export")
        if refusal := self._parts.own.refusal(command.open.source_instance_id):
            raise NotAnExport(refusal)
        self._request_id = command.open.request_id
        self._target_instance_id = command.open.target_instance_id
        return command.open

    async def _open(self, opening: worker_pb2.ExportOpen, exported: Exported) -> ExportOutcome | None:
        """Let the target read the blocks that exist, and tell it all about the request."""
        if self._parts.front_ends.by_client(exported.key.client) is None:
            self._reason = "its front end is gone"
            return ExportOutcome.GONE
        blocks = self._parts.blocks
        if targets := addresses_of(opening.kv_addresses, blocks.addresses):
            self._session = await blocks.open(self._request_id, targets)
        await self._announce(0, exported.block_hashes)
        await self._parts.faults.hold("export:open")
        opened = worker_pb2.ExportOpened(
            frontend_id=exported.frontend_id,
            handle=exported.key.handle,
            epoch=exported.epoch,
            frames=[bytes(frame) for frame in exported.frames],
            output_token_ids=exported.output_token_ids,
            phase=PHASE_NUMBERS[exported.phase],
            layout=kv_layout(self._parts.info.kv_shape),
            traceparent=exported.traceparent,
            blocks=block_identities(exported.block_hashes),
            kv_addresses=[address.message() for address in blocks.addresses],
            kv_tickets=[] if self._session is None else [ticket.secret for ticket in self._session.tickets],
            replay_reason=exported.replay_reason,
            model=identity_message(self._parts.info.identity),
            adapter_version=exported.adapter_version,
        )
        self.lease.send(worker_pb2.ExportEvent(opened=opened))
        return None

    async def _announce(self, first_block: int, hashes: Sequence[bytes]) -> None:
        if self._session is not None:
            await self._session.announce(first_block, hashes)

    async def _follow_commands(self) -> ExportOutcome:
        """Handle commands and signals until there is an outcome."""
        while True:
            outcome = await self._handle(await self._next_item())
            if outcome is not None:
                return outcome

    async def _next_item(self) -> Item | None:
        """Return the next command or signal, or None once the target is silent for too long."""
        if self._paused_s is not None:
            left_s = self._paused_s + self._parts.settings.pause_limit_s - _now_s()
            return await self.lease.inbox.next(max(0.0, left_s))
        item = await self.lease.inbox.next(_IDLE_S)
        # A round of copying takes as long as it takes.
        while item is None and self._session is not None:
            left_s = _IDLE_S - await self._session.quiet_s()
            if left_s <= 0.0:
                break
            item = await self.lease.inbox.next(left_s)
        return item

    async def _handle(self, item: Item | None) -> ExportOutcome | None:
        match item:
            case Released():
                # By the front end, which has accepted the target.
                return self._released()
            case Ended(reason):
                # The request was aborted, or its front end is gone.
                self._reason = reason
                return ExportOutcome.GONE
            case Owned():
                # The answer to a query, later than it was waited for.
                return None
            case Broken(reason):
                # The target, or the stream to it.
                return await self._on_target_lost(reason)
            case None:
                return await self._on_target_lost("the target fell silent")
            case _:
                return await self._handle_command(item)

    async def _handle_command(self, command: worker_pb2.ExportCommand) -> ExportOutcome | None:
        match command.WhichOneof("body"):
            case "more" if not self.paused:
                return await self._send_more_blocks(command.more.have_blocks)
            case "pause" if not self.paused:
                return await self._pause(command.pause)
            case "end" if command.end.committed and self.paused:
                return ExportOutcome.RELEASE
            case "end":
                self._reason = command.end.reason or "ended by the target"
                return ExportOutcome.RESUME
            case other:
                return await self._on_target_lost(f"unexpected command {other}")

    async def _send_more_blocks(self, have_blocks: int) -> ExportOutcome | None:
        await self._parts.faults.hold("export:pre_copy")
        try:
            hashes = await run_to_completion(self._parts.engine.export_more(self._request_id, have_blocks))
        except EngineRefusal as error:
            return self._refused(error)
        await self._announce(have_blocks, hashes)
        blocks = worker_pb2.ExportBlocks(first_block=have_blocks, blocks=block_identities(hashes))
        self.lease.send(worker_pb2.ExportEvent(blocks=blocks))
        return None

    async def _pause(self, command: worker_pb2.ExportPause) -> ExportOutcome | None:
        engine, have_blocks = self._parts.engine, command.have_blocks
        try:
            pause = await run_to_completion(
                engine.export_stop(self._request_id)
                if command.replay
                else engine.export_pause(self._request_id, have_blocks)
            )
        except EngineRefusal as error:
            return self._refused(error)
        self._paused_s = _now_s()
        await self._announce(have_blocks, pause.block_hashes)
        await self._parts.faults.hold("export:paused")
        paused = worker_pb2.ExportPaused(
            new_output_token_ids=pause.new_output_token_ids,
            computed_tokens=pause.computed_tokens,
            first_block=have_blocks,
            blocks=block_identities(pause.block_hashes),
            sampling_state=pause.sampling_state,
            token_interval_ms=pause.token_interval_ms,
            predicted_remaining_tokens=pause.predicted_remaining_tokens,
            answer_pace=self._answer_pace(pause),
            waited_s=pause.waited_s,
            since_arrival_s=self._since_arrival_s(),
        )
        self.lease.send(worker_pb2.ExportEvent(paused=paused))
        return None

    def _refused(self, error: EngineRefusal) -> ExportOutcome:
        self._reason = str(error)
        return ExportOutcome.GONE if isinstance(error, Gone) else ExportOutcome.RESUME

    def _answer_pace(self, pause: ExportedPause) -> worker_pb2.AnswerPace | None:
        """Return the pace state until now; None before the first answering token."""
        running = None if self.key is None else self._parts.running.get(self.key)
        if running is None:
            return None
        now_s = time.monotonic()
        running.pace.count(self._opened_tokens + len(pause.new_output_token_ids), now_s)
        return running.pace.leave(now_s)

    def _since_arrival_s(self) -> float | None:
        running = None if self.key is None else self._parts.running.get(self.key)
        return None if running is None or running.arrived_s is None else time.monotonic() - running.arrived_s

    def _released(self) -> ExportOutcome:
        """Handle a release; a request that is not paused here must stop at once."""
        if self.paused:
            return ExportOutcome.RELEASE
        self._abort()
        self._reason = "released"
        return ExportOutcome.GONE

    def _abort(self) -> None:
        """End the request here: another instance runs it."""
        running = self._take_running()
        if running is not None and self.key is not None:
            self._parts.engine.abort([self.key])
            self._parts.metrics.finished["aborted"] += 1
            self._parts.events.gone(running)

    def _take_running(self) -> RunningRequest | None:
        """Remove the exported request from the worker's table, and return it; None if it has left, or if it
        has left and come back in a later epoch."""
        running = None if self.key is None else self._parts.running.get(self.key)
        if self.key is None or running is None or running.epoch != self.epoch:
            return None
        return self._parts.running.remove(self.key)

    async def _on_target_lost(self, reason: str) -> ExportOutcome:
        self._reason = reason
        return await self._query_ownership() if self.paused else ExportOutcome.RESUME

    async def _query_ownership(self) -> ExportOutcome:
        """Ask the front end for the outcome: the request is paused, and the target is gone."""
        assert self.key is not None
        query = worker_pb2.OwnershipQuery(handle=self.key.handle, epoch=self.epoch)
        for _ in range(_OWNERSHIP_QUERIES_MAX):
            front_end = self._parts.front_ends.by_client(self.key.client)
            if front_end is None or not front_end.send(worker_pb2.AttachDown(ownership_query=query)):
                return ExportOutcome.GONE
            outcome = await self._wait_for_ownership()
            if outcome is not None:
                return outcome
        front_end = self._parts.front_ends.by_client(self.key.client)
        if front_end is not None:
            front_end.disconnect("did not answer ownership queries")
            self._parts.front_ends.detach(front_end)
        return ExportOutcome.GONE

    async def _wait_for_ownership(self) -> ExportOutcome | None:
        """Return the outcome that the front end's reply implies; None if it took too long."""
        until_s = _now_s() + OWNERSHIP_S
        while True:
            item = await self.lease.inbox.next(max(0.0, until_s - _now_s()))
            match item:
                case Owned(current):
                    return ExportOutcome.RESUME if current else ExportOutcome.RELEASE
                case Released():
                    return ExportOutcome.RELEASE
                case Ended(reason):
                    self._reason = reason
                    return ExportOutcome.GONE
                case None:
                    return None
                case Broken():
                    continue
                case _:
                    if item.HasField("end") and item.end.committed:
                        return ExportOutcome.RELEASE

    async def _settle(self) -> None:
        """Carry out the outcome, final from here on: nothing of the export is left when this returns."""
        self.decided = True
        await run_to_completion(self._carry_out(self._outcome))

    async def _carry_out(self, outcome: ExportOutcome) -> None:
        if outcome is ExportOutcome.RELEASE:
            await self._parts.faults.hold("export:adopt")
        if self._session is not None:
            self._session.taken = outcome is ExportOutcome.RELEASE
            await self._session.end()
        try:
            if outcome is ExportOutcome.RELEASE:
                await self._parts.engine.export_release(self._request_id)
            else:
                await self._parts.engine.export_resume(self._request_id)
        except EngineRefusal as error:
            log.warning("%s after its export: %s", self._request_id, error)
        if outcome is ExportOutcome.RELEASE:
            self._parts.metrics.exports["committed"] += 1
            running = self._take_running()
            if running is not None:
                self._parts.metrics.finished["moved"] += 1
                self._parts.events.gone(running, moved_to=self._target_instance_id)
            log.info("%s has moved", self._request_id)
            return
        if self.lease.inbox.released:
            # The front end allowed the source to resume, and then accepted the target after all.
            self._abort()
        self._parts.metrics.exports["aborted"] += 1
        self._fail(self._reason or "ended by the source", gone=outcome is ExportOutcome.GONE)
        log.info("%s: export ended (%s): %s", self._request_id, outcome.value, self._reason)

    def _fail(self, reason: str, gone: bool = False) -> None:
        failed = worker_pb2.ExportFailed(reason=reason, gone=gone)
        self.lease.send(worker_pb2.ExportEvent(failed=failed))


class Exports:
    """Run each export in a task of its own that outlives its stream, and tell it what the front end says."""

    def __init__(self, parts: MigrationParts) -> None:
        self._parts = parts
        self._running: dict[Export, asyncio.Task[None]] = {}
        parts.front_ends.on_gone(self._front_end_gone)

    def __len__(self) -> int:
        return len(self._running)

    def start(self, lease: Lease) -> None:
        """Start to serve a new export stream."""
        export = Export(self._parts, lease)
        task = asyncio.create_task(export.run(), name="export")
        self._running[export] = task
        task.add_done_callback(lambda done: self._done(export, done))

    async def close(self) -> None:
        """Cancel all; a paused request resumes, or ends with the engine."""
        await cancel(*self._running.values())

    def open(self, key: RequestKey) -> bool:
        """Return whether this request is being exported."""
        return self._find(key) is not None

    # ---- messages of the front end

    def handle_release(self, key: RequestKey, epoch: int) -> bool:
        """Release an exported request; return False if it is not being exported in that epoch."""
        export = self._find(key)
        if export is None or export.epoch != epoch:
            return False
        if export.decided:
            # Its target may have reported the commit before.
            return export.releases
        export.lease.inbox.signal(Released())
        return True

    def handle_ownership(self, key: RequestKey, epoch: int, current: bool) -> None:
        """Pass on the reply to an OwnershipQuery."""
        export = self._find(key)
        if export is not None and export.epoch == epoch:
            export.lease.inbox.signal(Owned(current))

    def request_aborted(self, key: RequestKey) -> None:
        """End the export of a request that the front end has aborted."""
        export = self._find(key)
        if export is not None:
            export.lease.inbox.signal(Ended("the request was aborted"))

    def _front_end_gone(self, client: int) -> None:
        for export in self._running:
            if export.key is not None and export.key.client == client:
                export.lease.inbox.signal(Ended("its front end is gone"))

    def _find(self, key: RequestKey) -> Export | None:
        return next((export for export in self._running if export.key == key), None)

    def _done(self, export: Export, task: asyncio.Task[None]) -> None:
        del self._running[export]
        if (error := task_error(task)) is not None:
            loop_failed(_LOOP, "", error)


def _now_s() -> float:
    """Return the event loop's time, which its timers use."""
    return asyncio.get_running_loop().time()
