"""Run one migration from admission to its end: call the target, and maintain the record."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import grpc

from migration_svc.journal import Journal, JournalClosed, JournalOpened
from migration_svc.metrics import MigrationMetrics
from migration_svc.slots import MigrationSlots, NotAdmitted
from migration_svc.traces import MigrationTrace, MigrationTraces
from tailrace.handover import SETTLE_S
from tailrace.numeric import Duration, WholeRange
from tailrace.security.roles import Role
from tailrace.service.channels import Channels, decoded, format_error
from tailrace.service.settings import setting
from tailrace.v1 import migration_pb2, types_pb2, worker_pb2, worker_pb2_grpc

log = logging.getLogger(__name__)

ABORTED: Final = types_pb2.MIGRATION_STATE_ABORTED
COMMITTED: Final = types_pb2.MIGRATION_STATE_COMMITTED
GONE: Final = types_pb2.MIGRATION_STATE_GONE
UNKNOWN: Final = types_pb2.MIGRATION_STATE_UNKNOWN
ENDED: Final = frozenset({ABORTED, COMMITTED, GONE, UNKNOWN})

_RETRY_S: Final = 0.5
# For so long a target that cannot be reached is called again, and asked how a migration ended.
_UNREACHABLE_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class CopyRules:
    """How a request is copied."""

    # As long as a migration may wait for a slot before (slots.py).
    room_wait_s: float = setting(
        10.0,
        "Maximum seconds that a migration waits for a slot, and again for room at its target.",
        "--patience",
        type=Duration(min=0.1),
    )
    timeout_s: float = setting(
        10.0,
        "Seconds after which an uncommitted migration is aborted, from when it has room.",
        "--timeout",
        type=Duration(min=0.1),
    )
    max_rounds: int = setting(
        4,
        "Maximum copy rounds before the request is paused, however much is left.",
        type=WholeRange(min=1),
    )
    stop_threshold_blocks: int = setting(
        2,
        "KV blocks that may be left to copy when the request is paused.",
        "--stop-threshold",
        type=WholeRange(min=1),
    )


@dataclass(frozen=True, slots=True)
class Order:
    """A requested migration with the addresses of both ends, and the target's incarnation there."""

    request: migration_pb2.MigrateRequest
    source_address: str
    target_address: str
    target_incarnation: str
    # As its instances name it.
    model: str


class MigrationRun:
    """Run one migration. `record` always has its current state."""

    def __init__(
        self,
        record: migration_pb2.MigrationRecord,
        order: Order,
        rules: CopyRules,
        on_change: Callable[[migration_pb2.MigrationRecord], None],
    ) -> None:
        self.record = record
        self._order = order
        self._rules = rules
        self._on_change = on_change
        # Whether an event of the target has come.
        self._heard = False

    async def run(
        self,
        slots: MigrationSlots,
        channels: Channels,
        journal: Journal,
        metrics: MigrationMetrics,
        traces: MigrationTraces,
    ) -> None:
        """Run to the end, which is in the record. Raises only CancelledError."""
        record, begun = self.record, False
        trace = traces.start(self._order.request.traceparent, record)
        try:
            async with slots.hold(record.request_id, record.source_instance_id, record.target_instance_id):
                journal.write(JournalOpened(record=record, target_address=self._order.target_address))
                begun = True
                problem = await self._import(channels, trace)
            if problem:
                # The call has ended, and the migration may not have.
                end = await cancel_or_ask_end(record.migration_id, self._order.target_address, channels)
                self._apply_event(end)
                record.error = f"{problem}; {end.reason}" if end.reason else record.error
            journal.write(JournalClosed(migration_id=record.migration_id))
        except NotAdmitted as refused:
            self._end(ABORTED, str(refused))
        finally:
            if record.state not in ENDED:
                # The target sees its call cancelled, and aborts unless it has asked the front end already.
                # The next run asks how a migration ended that the journal has as open.
                self._end(UNKNOWN if begun else ABORTED, "the migration service stopped")
            metrics.ended(record, self._order.model)
            traces.end(trace, record)
            # Only after its slot is free, because a watcher may migrate the request again at once.
            self._on_change(record)

    async def _import(self, channels: Channels, trace: MigrationTrace) -> str:
        """Call the target until the migration has ended; return why its end is not known, empty if it is."""
        record, loop = self.record, asyncio.get_running_loop()
        give_up_s, again = loop.time() + _UNREACHABLE_S, False
        while True:
            try:
                async for event in self._call(channels, trace):
                    self._apply_event(decoded(event, record.target_instance_id))
            except grpc.aio.AioRpcError as error:
                problem = f"target {record.target_instance_id}: {format_error(error)}"
                unreached = error.code() is grpc.StatusCode.UNAVAILABLE and not self._heard
                if unreached and loop.time() < give_up_s:
                    # The target is busy, or was restarted a moment ago.
                    again = True
                    await asyncio.sleep(_RETRY_S)
                    continue
                # So a target refuses to begin; but the second time perhaps because it began the first time.
                refused = error.code() is grpc.StatusCode.FAILED_PRECONDITION and not again
                if refused and record.state not in ENDED:
                    self._end(ABORTED, problem)
            else:
                problem = f"target {record.target_instance_id} ended the call without an outcome"
            return "" if record.state in ENDED else problem

    def _call(
        self, channels: Channels, trace: MigrationTrace
    ) -> grpc.aio.UnaryStreamCall[worker_pb2.ImportRequest, worker_pb2.ImportEvent]:
        stub = worker_pb2_grpc.WorkerStub(channels.get(self._order.target_address, Role.WORKER))
        record, request, rules = self.record, self._order.request, self._rules
        room_wait_s = rules.room_wait_s if request.wait_for_room else 0.0
        return stub.Import(
            worker_pb2.ImportRequest(
                migration_id=record.migration_id,
                request_id=record.request_id,
                source_instance_id=record.source_instance_id,
                source_address=self._order.source_address,
                target_instance_id=record.target_instance_id,
                target_incarnation=self._order.target_incarnation,
                from_epoch=request.from_epoch,
                epoch=record.epoch,
                mode=request.mode or worker_pb2.COPY_MODE_PRE_COPY,
                stop_threshold_blocks=rules.stop_threshold_blocks,
                max_rounds=rules.max_rounds,
                timeout_s=rules.timeout_s,
                traceparent=trace.traceparent,
                reason=record.reason,
                room_wait_s=room_wait_s,
            ),
            timeout=room_wait_s + rules.timeout_s + SETTLE_S,
        )

    def _apply_event(self, event: worker_pb2.ImportEvent) -> None:
        record = self.record
        self._heard = True
        if event.HasField("round"):
            record.rounds.append(event.round)
            record.bytes += event.round.bytes
        if event.state == COMMITTED:
            record.pause_ms = event.pause_ms
            record.pause_steps = event.pause_steps
            record.step_wait_ms = event.step_wait_ms
            record.phase = event.phase
            record.tokens = event.tokens
            self._end(COMMITTED, "")
        elif event.state in ENDED:
            self._end(event.state, event.reason or "the target gave no reason")
        elif event.state != record.state or event.HasField("round"):
            if event.way:
                record.way, record.way_reason = event.way, event.way_reason
                record.held_blocks, record.held_bytes = event.held_blocks, event.held_bytes
            record.state = event.state
            self._on_change(record)

    def _end(self, state: types_pb2.MigrationState.ValueType, error: str) -> None:
        record = self.record
        record.state = state
        record.error = error
        record.closed_s = time.time()
        if state in (ABORTED, UNKNOWN):
            word = "aborted" if state == ABORTED else "ended in an unknown way"
            log.warning("migration %s of %s %s: %s", record.migration_id, record.request_id, word, error)


async def cancel_or_ask_end(
    migration_id: str, target_address: str, channels: Channels
) -> worker_pb2.ImportEvent:
    """Have the target abort a migration unless it is being committed, and return how it ended."""
    stub = worker_pb2_grpc.WorkerStub(channels.get(target_address, Role.WORKER))
    request = worker_pb2.CancelImportRequest(migration_id=migration_id)
    loop = asyncio.get_running_loop()
    # It may have to wait for the front end's answer. One that cannot be reached is tried for less long.
    until_s, give_up_s = loop.time() + SETTLE_S, loop.time() + _UNREACHABLE_S
    while True:
        try:
            call = stub.CancelImport(request, timeout=max(0.0, until_s - loop.time()))
            reply = decoded(await call, target_address)
        except grpc.aio.AioRpcError as error:
            reason = f"target not reached: {format_error(error)}"
            if error.code() is not grpc.StatusCode.UNAVAILABLE or loop.time() > give_up_s:
                return worker_pb2.ImportEvent(state=UNKNOWN, reason=reason)
        except asyncio.InvalidStateError:
            return worker_pb2.ImportEvent(state=UNKNOWN, reason="the target's channel was closed")
        else:
            if reply.HasField("end"):
                return reply.end
            reason = "the target knows of no such migration: it did not begin there, or its process has ended"
            return worker_pb2.ImportEvent(state=UNKNOWN, reason=reason)
        await asyncio.sleep(_RETRY_S)
