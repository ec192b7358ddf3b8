"""The gRPC Migration service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

import grpc

from migration_svc.many import LOOP, ManyMigrations
from migration_svc.runs import History, InvalidMigration, Runs, Stopping, UnknownInstance
from tailrace.records import InstanceRecord
from tailrace.service.tasks import cancel
from tailrace.v1 import migration_pb2, migration_pb2_grpc


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
        request: migration_pb2.MigrateRequest,
        context: grpc.aio.ServicerContext[migration_pb2.MigrateRequest, migration_pb2.MigrationRecord],
    ) -> AsyncIterator[migration_pb2.MigrationRecord]:
        """Stream a migration's states; it continues if the caller disconnects."""
        try:
            updates = self._runs.start(request, self._instances())
        except InvalidMigration as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except UnknownInstance as error:
            await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
        except Stopping as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        async for record in updates:
            yield record

    async def MigrateMany(
        self,
        request_iterator: AsyncIterator[migration_pb2.MigrateManyRequest],
        context: grpc.aio.ServicerContext[migration_pb2.MigrateManyRequest, migration_pb2.MigrateManyReply],
    ) -> AsyncIterator[migration_pb2.MigrateManyReply]:
        """Stream the ends of migrations; those that have begun continue if the caller disconnects."""
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
