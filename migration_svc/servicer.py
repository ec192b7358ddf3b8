"""The gRPC Migration service."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Final

import grpc

from migration_svc.migration import ENDED
from migration_svc.runs import History, InvalidMigration, Runs, Stopping, UnknownInstance
from tailrace.records import InstanceRecord
from tailrace.service.tasks import cancel
from tailrace.telemetry.incidents import loop_failed, loop_named, shown
from tailrace.v1 import migration_pb2, migration_pb2_grpc

# Its name as a loop.
LOOP: Final = loop_named("requested migrations")
# Migrations of a stream that have not ended, or whose end has not been sent; then no more are read.
_OPEN_MAX: Final = 1_024
# States of a stream's watched migrations that wait to be sent; for a slow reader the oldest are dropped.
_CHANGED_MAX: Final = 1_024
# Seconds between two replies: a reply costs both sides as much as a dozen ends.
_GATHER_S: Final = 0.005

# Status of a migration that is refused; the others of its stream go on.
_REFUSALS: Final[Mapping[type[Exception], grpc.StatusCode]] = {
    InvalidMigration: grpc.StatusCode.INVALID_ARGUMENT,
    UnknownInstance: grpc.StatusCode.NOT_FOUND,
    Stopping: grpc.StatusCode.UNAVAILABLE,
}


class ManyMigrations:
    """The migrations of one stream. They continue when the stream breaks; then nobody hears of their ends."""

    def __init__(self, runs: Runs, instances: Callable[[], Mapping[str, InstanceRecord]]) -> None:
        self._runs = runs
        self._instances = instances
        self._open = 0
        self._changed: deque[migration_pb2.MigrationUpdate] = deque(maxlen=_CHANGED_MAX)
        self._ended: list[migration_pb2.MigrationUpdate] = []
        # No more will begin.
        self._complete = False
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    async def read(self, requests: AsyncIterator[migration_pb2.MigrateManyRequest]) -> None:
        """Begin what is requested, as long as there is room for more."""
        try:
            async for request in requests:
                for each in request.migrations:
                    await self._room.wait()
                    self._begin(each)
        finally:
            self._complete = True
            self._news.set()

    async def replies(self) -> AsyncIterator[migration_pb2.MigrateManyReply]:
        """Yield an empty reply, then what becomes of the migrations, until all that have begun have ended
        and no more will begin."""
        yield migration_pb2.MigrateManyReply()
        while not self._complete or self._open:
            await self._news.wait()
            self._news.clear()
            changed, ended = [*self._changed], self._ended
            if not (changed or ended):
                continue
            self._changed.clear()
            self._ended = []
            self._open -= len(ended)
            if self._open < _OPEN_MAX:
                self._room.set()
            yield migration_pb2.MigrateManyReply(changed=changed, ended=ended)
            await asyncio.sleep(_GATHER_S)

    def _begin(self, each: migration_pb2.NumberedMigration) -> None:
        number, watched = each.number, each.watched
        self._open += 1
        if self._open >= _OPEN_MAX:
            self._room.clear()

        def on_change(record: migration_pb2.MigrationRecord) -> None:
            if record.state in ENDED:
                self._end(migration_pb2.MigrationUpdate(number=number, record=record))
            elif watched:
                self._changed.append(migration_pb2.MigrationUpdate(number=number, record=record))
                self._news.set()

        try:
            self._runs.begin(each.request, self._instances(), on_change)
        except (InvalidMigration, UnknownInstance, Stopping) as error:
            code, _ = _REFUSALS[type(error)].value
            self._end(migration_pb2.MigrationUpdate(number=number, error=str(error), code=code))
        except Exception as error:  # noqa: BLE001 - whatever one order leads to, the others go on
            loop_failed(LOOP, each.request.request_id, error)
            code, _ = grpc.StatusCode.INTERNAL.value
            reason = f"the migration has not begun: {shown(error)}"
            self._end(migration_pb2.MigrationUpdate(number=number, error=reason, code=code))

    def _end(self, end: migration_pb2.MigrationUpdate) -> None:
        self._ended.append(end)
        self._news.set()


class MigrationServicer(migration_pb2_grpc.MigrationServicer):
    """Translate calls to `Runs`."""

    def __init__(
        self, runs: Runs, history: History, instances: Callable[[], Mapping[str, InstanceRecord]]
    ) -> None:
        self._runs = runs
        self._history = history
        self._instances = instances

    async def Migrate(
        self,
        request_iterator: AsyncIterator[migration_pb2.MigrateManyRequest],
        context: grpc.aio.ServicerContext[migration_pb2.MigrateManyRequest, migration_pb2.MigrateManyReply],
    ) -> AsyncIterator[migration_pb2.MigrateManyReply]:
        """Stream what becomes of migrations; those that have begun continue if the caller disconnects."""
        many = ManyMigrations(self._runs, self._instances)
        reading = asyncio.create_task(many.read(request_iterator), name=LOOP)
        try:
            async for reply in many.replies():
                yield reply
            await reading
        finally:
            await cancel(reading)
            # It keeps an error, whose frames have it.
            del reading

    async def ListMigrations(
        self,
        request: migration_pb2.ListMigrationsRequest,
        context: grpc.aio.ServicerContext[
            migration_pb2.ListMigrationsRequest, migration_pb2.ListMigrationsReply
        ],
    ) -> migration_pb2.ListMigrationsReply:
        """List migrations, newest first."""
        return migration_pb2.ListMigrationsReply(
            migrations=self._history.list(request.request_id, request.limit)
        )
