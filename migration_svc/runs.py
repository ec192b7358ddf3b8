"""Run all migrations: start them, own their tasks, and publish their states to watchers."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Final

from migration_svc.journal import Journal
from migration_svc.metrics import MigrationMetrics
from migration_svc.migration import ENDED, CopyRules, MigrationRun, Order, cancel_or_ask_end, closed
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


# Updates queued for a slow watcher; it may miss older ones, but never the last.
_WATCH_LIMIT: Final = 64

Updates = asyncio.Queue[migration_pb2.MigrationRecord]


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
        ends = await asyncio.gather(*(cancel_or_ask_end(entry, self._channels) for entry in unfinished))
        for entry, end in zip(unfinished, ends, strict=True):
            record = migration_pb2.MigrationRecord(
                migration_id=entry.migration_id,
                request_id=entry.request_id,
                source_instance_id=entry.source_instance_id,
                target_instance_id=entry.target_instance_id,
                epoch=entry.epoch,
                reason=entry.reason,
                policy=entry.policy,
                state=end.state,
                error=f"the migration service was restarted; {end.reason}" if end.reason else "",
                opened_s=entry.opened_s,
                closed_s=time.time(),
            )
            self._journal.write(closed(record))
            self._history.add(record)

    def start(
        self, request: migration_pb2.MigrateRequest, instances: Mapping[str, InstanceRecord]
    ) -> AsyncIterator[migration_pb2.MigrationRecord]:
        """Begin a migration; return an iterator over its states, the last of which is its end.

        The migration continues whether or not they are read. Raise InvalidMigration, UnknownInstance or
        Stopping.
        """
        updates: Updates = asyncio.Queue(_WATCH_LIMIT)
        record = self._begin(request, instances, lambda changed: _offer(updates, changed))
        _offer(updates, record)
        return _watch(updates)

    def begin(
        self,
        request: migration_pb2.MigrateRequest,
        instances: Mapping[str, InstanceRecord],
        on_end: Callable[[migration_pb2.MigrationRecord], None],
    ) -> None:
        """Begin a migration of which only the end is of interest; `on_end` gets the final record, which it
        must not change.

        Raise InvalidMigration, UnknownInstance or Stopping; then it is not called.
        """

        def changed(record: migration_pb2.MigrationRecord) -> None:
            if record.state in ENDED:
                on_end(record)

        self._begin(request, instances, changed)

    def _begin(
        self,
        request: migration_pb2.MigrateRequest,
        instances: Mapping[str, InstanceRecord],
        on_change: Callable[[migration_pb2.MigrationRecord], None],
    ) -> migration_pb2.MigrationRecord:
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
        return record

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


async def _watch(updates: Updates) -> AsyncIterator[migration_pb2.MigrationRecord]:
    while True:
        record = await updates.get()
        yield record
        if record.state in ENDED:
            return


def _offer(updates: Updates, record: migration_pb2.MigrationRecord) -> None:
    """Queue a copy, dropping the oldest update if the queue is full."""
    if updates.full():
        updates.get_nowait()
    copy = migration_pb2.MigrationRecord()
    copy.CopyFrom(record)
    updates.put_nowait(copy)


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
