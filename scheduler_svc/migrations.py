"""The migration services, as the scheduler calls them."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from typing import Final

import grpc

from scheduler_svc.refused import Refused
from tailrace.security.roles import Role
from tailrace.service.channels import Channels
from tailrace.service.preferred import preferred
from tailrace.store.membership import Membership
from tailrace.v1 import migration_pb2
from tailrace.v1.migration_pb2_grpc import MigrationStub

log = logging.getLogger(__name__)

KIND: Final = "migration"
# Longer than a migration may wait and take; the service ends it by itself before.
_MIGRATE_S: Final = 180.0
_LIST_S: Final = 3.0


class Migrations:
    """Asks the migration service that leads, then the others: all schedulers ask the same one."""

    def __init__(self, members: Membership, channels: Channels) -> None:
        self._members = members
        self._channels = channels

    async def migrate(
        self, request: migration_pb2.MigrateRequest
    ) -> AsyncGenerator[migration_pb2.MigrationRecord]:
        """Records until the migration is over. Ending early does not end it. Raises Refused."""
        failure: grpc.aio.AioRpcError | None = None
        for service in preferred(self._members, KIND):
            heard = False
            call = MigrationStub(self._channels.get(service.address, Role.MIGRATION)).Migrate(
                request, timeout=_MIGRATE_S
            )
            try:
                async for record in call:
                    heard = True
                    yield record
                return
            except grpc.aio.AioRpcError as error:
                # Once it has begun there, another service must not begin it again.
                if heard or error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise Refused(error.code(), error.details() or error.code().name) from error
                log.warning("migration service %s: %s", service.service_id, error.details())
                failure = error
            finally:
                call.cancel()
        raise _none(failure)

    async def recent(self, request: migration_pb2.ListMigrationsRequest) -> migration_pb2.ListMigrationsReply:
        """The last migrations. Raises Refused."""
        failure: grpc.aio.AioRpcError | None = None
        for service in preferred(self._members, KIND):
            stub = MigrationStub(self._channels.get(service.address, Role.MIGRATION))
            try:
                return await stub.ListMigrations(request, timeout=_LIST_S)
            except grpc.aio.AioRpcError as error:
                failure = error
        raise _none(failure)


def _none(failure: grpc.aio.AioRpcError | None) -> Refused:
    why = "none is registered" if failure is None else failure.details() or failure.code().name
    return Refused(grpc.StatusCode.UNAVAILABLE, f"no migration service answers: {why}")
