"""Run all migrations: start them, own their tasks, and publish their states to watchers."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Final

from migration_svc.journal import Journal, JournalClosed
from migration_svc.metrics import MigrationMetrics
from migration_svc.migration import CopyRules, MigrationRun, Order, cancel_or_ask_end
from migration_svc.slots import MigrationSlots
from migration_svc.traces import MigrationTraces
from tailrace.records import InstanceRecord
from tailrace.request_ids import matching
from tailrace.service.channels import Channels
from tailrace.service.tasks import task_error
from tailrace.telemetry.incidents import loop_failed, loop_named
from tailrace.v1 import migration_pb2, types_pb2

log = logging.getLogger(__name__)

_LOOP: Final = loop_named("migrations")


class UnknownInstance(Exception):
    """An instance is not in the fleet; the message names field and instance."""


class InvalidMigration(Exception):
    """The request is invalid; the message names the field."""


class Stopping(Exception):
    """This service finishes its migrations and begins no more."""

    def __init__(self) -> None:
        super().__init__("this migration service is stopping")


HISTORY_MAX: Final = 1000


class History:
    """Records by migration id, oldest first; at most HISTORY_MAX of them."""

    def __init__(self) -> None:
        self._records: OrderedDict[str, migration_pb2.MigrationRecord] = OrderedDict()

    def add(self, record: migration_pb2.MigrationRecord) -> None:
        """Add a record, which the caller may change later."""
        self._records[record.migration_id] = record
        while len(self._records) > HISTORY_MAX:
            self._records.popitem(last=False)

    def list(self, request_id: str, limit: int) -> list[migration_pb2.MigrationRecord]:
        """Return the newest `limit` records (0: all) of a request ("": of all), newest first.

        `request_id`: the fleet's, or its client's.
        """
        records = [*reversed(self._records.values())]
        if request_id:
            known = {record.request_id for record in records}
            found = {request_id} if request_id in known else set(matching(request_id, known))
            records = [record for record in records if record.request_id in found]
        return records[:limit] if limit else records


class Runs:
    """Own every migration's task until it ends or `close` is called."""

    def __init__(
        self,
        channels: Channels,
        slots: MigrationSlots,
        journal: Journal,
        history: History,
        metrics: MigrationMetrics,
        traces: MigrationTraces,
        rules: CopyRules,
    ) -> None:
        self._channels = channels
        self._slots = slots
        self._journal = journal
        self._history = history
        self._metrics = metrics
        self._traces = traces
        self._rules = rules
        self._tasks: set[asyncio.Task[None]] = set()
        self._admitting = True

    def __len__(self) -> int:
        return len(self._tasks)

    async def clean_up(self) -> None:
        """Cancel what an earlier run left open, concurrently: each target has its own deadline.

        What has been committed meanwhile is recorded so.
        """
        unfinished = self._journal.unfinished
        calls = [
            cancel_or_ask_end(entry.record.migration_id, entry.target_address, self._channels)
            for entry in unfinished
        ]
        for entry, end in zip(unfinished, await asyncio.gather(*calls), strict=True):
            record = entry.record
            record.state, record.closed_s = end.state, time.time()
            record.error = f"the migration service was restarted; {end.reason}" if end.reason else ""
            self._journal.write(JournalClosed(migration_id=record.migration_id))
            self._history.add(record)

    def begin(
        self,
        request: migration_pb2.MigrateRequest,
        instances: Mapping[str, InstanceRecord],
        on_change: Callable[[migration_pb2.MigrationRecord], None],
    ) -> None:
        """Begin a migration. `on_change` gets its record, which will change, in each state from the first to
        the end.

        Raise InvalidMigration, UnknownInstance or Stopping; then it is not called.
        """
        if not self._admitting:
            raise Stopping
        order = _order(request, instances)
        record = migration_pb2.MigrationRecord(
            migration_id=uuid.uuid4().hex[:16],
            request_id=request.request_id,
            source_instance_id=request.source_instance_id,
            target_instance_id=request.target_instance_id,
            epoch=request.from_epoch + 1,
            state=types_pb2.MIGRATION_STATE_QUEUED,
            reason=request.reason,
            policy=request.policy,
            opened_s=time.time(),
        )
        self._history.add(record)
        run = MigrationRun(record, order, self._rules, on_change)
        task = asyncio.create_task(
            run.run(self._slots, self._channels, self._journal, self._metrics, self._traces),
            name=f"migration {record.migration_id}",
        )
        self._tasks.add(task)
        task.add_done_callback(self._done)
        on_change(record)

    def stop_admitting(self) -> None:
        """Begin no more migrations; the ones in progress continue."""
        self._admitting = False

    async def wait(self) -> None:
        """Wait until the present migrations have ended; each has a deadline of its own."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def close(self) -> None:
        """Abort what is not committed, and wait for its end."""
        for task in self._tasks:
            task.cancel()
        await self.wait()

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if (error := task_error(task)) is not None:
            # A bug; watchers have received "aborted".
            loop_failed(_LOOP, task.get_name(), error)


# A migration raises the epoch by one, and uint32 fields carry it.
_FROM_EPOCH_MAX: Final = 2**32 - 2


def _order(request: migration_pb2.MigrateRequest, instances: Mapping[str, InstanceRecord]) -> Order:
    for field in ("request_id", "source_instance_id", "target_instance_id"):
        if not getattr(request, field):
            raise InvalidMigration(f"{field}: must not be empty")
    if request.from_epoch > _FROM_EPOCH_MAX:
        raise InvalidMigration(f"from_epoch: must be at most {_FROM_EPOCH_MAX}")
    if request.source_instance_id == request.target_instance_id:
        raise InvalidMigration(f"target_instance_id: the request is on {request.target_instance_id} already")
    ends = []
    for field in ("source_instance_id", "target_instance_id"):
        record = instances.get(getattr(request, field))
        if record is None:
            raise UnknownInstance(f"{field}: no instance {getattr(request, field)!r}")
        ends.append(record)
    source, target = ends
    return Order(request, source.address, target.address, target.incarnation, source.model)
