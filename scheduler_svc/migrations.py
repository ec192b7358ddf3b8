"""Migrations that the scheduler asks the migration service for."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Coroutine
from typing import Final

import grpc

from scheduler_svc.admin.errors import AdminError
from scheduler_svc.loop import Traceparents
from scheduler_svc.migration_stream import MigrationStream, StreamLost
from tailrace.actions import WhenFull
from tailrace.cluster import InstanceState, Phase, RequestView
from tailrace.control.events import MigrationClosed, MigrationOpened
from tailrace.control.reported_cluster import ReportedCluster
from tailrace.handover import MIGRATE_MAX_S, TransferMode, handover_between
from tailrace.model_identity import difference
from tailrace.records import ServiceRecord
from tailrace.security.roles import Role
from tailrace.service.channels import Channels, decoded, preferred
from tailrace.store.membership import Membership
from tailrace.telemetry.incidents import LimitedLog
from tailrace.v1 import migration_pb2, types_pb2, worker_pb2
from tailrace.v1.migration_pb2_grpc import MigrationStub

log = logging.getLogger(__name__)


KIND: Final = "migration"
_LIST_S: Final = 3.0
_UNAVAILABLE: Final = grpc.StatusCode.UNAVAILABLE
_STATUS: Final = {status.value[0]: status for status in grpc.StatusCode}


class Migrations:
    """Call the migration service, the leader first, so that all schedulers use the same one."""

    def __init__(self, members: Membership, channels: Channels) -> None:
        self._members = members
        self._channels = channels
        self._unreachable = LimitedLog(log)
        # By address and incarnation, so that a service that was restarted in place gets a stream of its own.
        self._streams: dict[tuple[str, str], MigrationStream] = {}

    async def migrate(
        self, request: migration_pb2.MigrateRequest
    ) -> AsyncGenerator[migration_pb2.MigrationRecord]:
        """Yield records until the migration is over. Closing the generator does not abort the migration.

        Raise AdminError.
        """
        failure: str | None = None
        for service in preferred(self._members, KIND):
            received = False
            call = MigrationStub(self._channels.get(service.address, Role.MIGRATION)).Migrate(
                request, timeout=MIGRATE_MAX_S
            )
            try:
                async for record in call:
                    received = True
                    yield decoded(record, service.service_id)
                return
            except grpc.aio.AioRpcError as error:
                # Once it has begun there, it must not be started on another service.
                if received or error.code() is not _UNAVAILABLE:
                    raise AdminError(error.code(), error.details() or error.code().name) from error
                self._log_unreachable(service, error)
                failure = _reason(error)
            finally:
                call.cancel()
        raise _unavailable(failure)

    async def run(self, request: migration_pb2.MigrateRequest) -> bool:
        """Migrate, over a stream that all such migrations share; return whether it was committed.

        Raise AdminError if it has not begun, or its end cannot be known.
        """
        failure: str | None = None
        for service in preferred(self._members, KIND):
            stream = self._stream_to(service)
            try:
                await stream.opened()
            except (grpc.aio.AioRpcError, StreamLost) as error:
                if isinstance(error, grpc.aio.AioRpcError) and error.code() is not _UNAVAILABLE:
                    raise AdminError(error.code(), error.details() or error.code().name) from error
                self._log_unreachable(service, error)
                failure = _reason(error)
                continue
            try:
                end = await stream.migrate(request, MIGRATE_MAX_S)
            except StreamLost as error:
                # Once it may have begun there, it must not be started on another service.
                lost = f"migration service {service.service_id}: {error}"
                raise AdminError(_UNAVAILABLE, lost) from error
            if not end.code:
                return end.state == types_pb2.MIGRATION_STATE_COMMITTED
            refused = AdminError(_STATUS.get(end.code, grpc.StatusCode.UNKNOWN), end.error)
            if refused.code is not _UNAVAILABLE:
                raise refused
            failure = _reason(refused)
        raise _unavailable(failure)

    async def close(self) -> None:
        """End all streams; migrations continue in the migration service."""
        streams, self._streams = list(self._streams.values()), {}
        for stream in streams:
            await stream.close()

    async def recent(self, request: migration_pb2.ListMigrationsRequest) -> migration_pb2.ListMigrationsReply:
        """Return the most recent migrations. Raise AdminError."""
        failure: str | None = None
        for service in preferred(self._members, KIND):
            stub = MigrationStub(self._channels.get(service.address, Role.MIGRATION))
            try:
                return decoded(await stub.ListMigrations(request, timeout=_LIST_S), service.address)
            except grpc.aio.AioRpcError as error:
                failure = _reason(error)
        raise _unavailable(failure)

    def _stream_to(self, service: ServiceRecord) -> MigrationStream:
        key = service.address, service.incarnation
        stream = self._streams.get(key)
        if stream is None or stream.broken:
            # Streams to services that have gone are broken, too.
            self._streams = {k: each for k, each in self._streams.items() if not each.broken}
            channel = self._channels.get(service.address, Role.MIGRATION)
            stream = self._streams[key] = MigrationStream(MigrationStub(channel))
        return stream

    def _log_unreachable(self, service: ServiceRecord, error: Exception) -> None:
        reason = f"migration service {service.service_id}: {_reason(error)}"
        self._unreachable.write(logging.WARNING, service.service_id, reason)


def _unavailable(failure: str | None) -> AdminError:
    return AdminError(_UNAVAILABLE, f"no migration service responds: {failure or 'none is registered'}")


def _reason(error: Exception) -> str:
    """Return gRPC's details, or its status without any, or what another error says."""
    if isinstance(error, grpc.aio.AioRpcError):
        return error.details() or error.code().name
    return str(error)


_PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION


class MigrationStarter:
    """Start migrations, at most one open migration per request."""

    def __init__(self, state: ReportedCluster, migrations: Migrations, traceparents: Traceparents) -> None:
        self._state = state
        self._migrations = migrations
        self._traceparents = traceparents

    def move(
        self,
        request: RequestView,
        target_id: str,
        reason: str,
        policy: str,
        mode: worker_pb2.CopyMode.ValueType,
        when_full: WhenFull = WhenFull.REFUSE,
    ) -> AsyncGenerator[migration_pb2.MigrationRecord]:
        """Enter the migration into the model; return a generator of its records until it is over.

        Raise AdminError, immediately or while iterating. `when_full` HOST acts like REFUSE here: whether host
        memory may take a request is up to the target's batch order.
        """
        return self._migrate(self._enter(request, target_id, reason, policy, mode, when_full))

    def order(
        self, request: RequestView, target_id: str, reason: str, policy: str, when_full: WhenFull
    ) -> Coroutine[None, None, bool]:
        """As `move`, with copy rounds, for a caller that needs to know only whether it was committed: that
        costs a fraction."""
        mode = worker_pb2.COPY_MODE_PRE_COPY
        return self._order(self._enter(request, target_id, reason, policy, mode, when_full))

    def _enter(
        self,
        request: RequestView,
        target_id: str,
        reason: str,
        policy: str,
        mode: worker_pb2.CopyMode.ValueType,
        when_full: WhenFull,
    ) -> migration_pb2.MigrateRequest:
        self.check(request, target_id)
        if not self._state.order(MigrationOpened(request, target_id)):
            raise AdminError(_PRECONDITION, f"request {request.request_id}: a migration of it is open")
        return migration_pb2.MigrateRequest(
            request_id=request.request_id,
            source_instance_id=request.instance_id,
            target_instance_id=target_id,
            from_epoch=request.epoch,
            reason=reason,
            policy=policy,
            mode=mode,
            traceparent=self._traceparents.get(request.request_id)
            or self._state.traceparent(request.request_id),
            wait_for_room=when_full is WhenFull.WAIT,
        )

    async def _order(self, request: migration_pb2.MigrateRequest) -> bool:
        try:
            return await self._migrations.run(request)
        finally:
            self._state.apply(MigrationClosed(request.request_id))

    async def _migrate(
        self, request: migration_pb2.MigrateRequest
    ) -> AsyncGenerator[migration_pb2.MigrationRecord]:
        records = self._migrations.migrate(request)
        try:
            async for record in records:
                yield record
        finally:
            await records.aclose()
            self._state.apply(MigrationClosed(request.request_id))

    def check(self, request: RequestView, target_id: str) -> None:
        """Check that the request can move to the target now. Raise AdminError."""
        view = self._state.view()
        target, tracked = view.instances.get(target_id), self._state.tracked(target_id)
        source = self._state.tracked(request.instance_id)
        if target is None or tracked is None or source is None:
            raise AdminError(grpc.StatusCode.NOT_FOUND, f"target_instance_id: no instance {target_id!r}")
        if target_id == request.instance_id:
            raise AdminError(_PRECONDITION, f"request {request.request_id} is already on {target_id}")
        if target.state is not InstanceState.ACTIVE:
            raise AdminError(
                _PRECONDITION, f"instance {target_id} is {target.state.value}; it gets no new requests"
            )
        if handover_between(source.record.handover, tracked.record.handover).mode is TransferMode.STAYS:
            stays = handover_between(source.record.handover, tracked.record.handover)
            raise AdminError(_PRECONDITION, f"request {request.request_id} cannot move: {stays.reason}")
        if tracked.record.model_fingerprint != source.record.model_fingerprint:
            # The move is by replay, which needs the same model.
            models = difference(source.record.model_identity, tracked.record.model_identity)
            if models:
                raise AdminError(_PRECONDITION, f"{request.instance_id} and {target_id}: {models}")
        if request.migrating:
            raise AdminError(_PRECONDITION, f"request {request.request_id}: a migration of it is open")
        if request.phase is Phase.PREFILL:
            raise AdminError(
                _PRECONDITION,
                f"request {request.request_id} is in prefill; it can migrate once it is decoding",
            )
