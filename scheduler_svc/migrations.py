"""Migrations that the scheduler asks the migration service for."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import grpc

from tailrace.service.channels import format_error
from tailrace.service.tasks import cancel, first_ended, run_once, task_error
from tailrace.telemetry.incidents import unreadable
from tailrace.v1 import migration_pb2

if TYPE_CHECKING:
    from tailrace.v1.migration_pb2_grpc import MigrationAsyncStub
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass

from scheduler_svc.admin.errors import AdminError
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
from tailrace.v1 import types_pb2, worker_pb2
from tailrace.v1.migration_pb2_grpc import MigrationStub

_OPEN_S: Final = 5.0
# Seconds between two messages: each costs both sides as much as a dozen migrations.
_GATHER_S: Final = 0.005


class StreamLost(Exception):
    """The stream broke after the migration was sent; the message says how. It may have begun."""


OnChange = Callable[[migration_pb2.MigrationRecord], None]
"""Gets the record of a migration in each state before its end."""


@dataclass(frozen=True, slots=True)
class _Sent:
    """A migration that was sent, or will be in a moment."""

    end: asyncio.Future[migration_pb2.MigrationUpdate]
    on_change: OnChange | None


class MigrationStream:
    """Migrate over one call, which begins at once. Once broken, it stays so."""

    def __init__(self, stub: MigrationAsyncStub) -> None:
        self._stub = stub
        loop = asyncio.get_running_loop()
        self._opened: asyncio.Future[None] = loop.create_future()
        self._count = 0
        self._unsent: list[migration_pb2.NumberedMigration] = []
        self._changed = asyncio.Event()
        self._open: dict[int, _Sent] = {}
        self._task = run_once("stream of migrations", self._run)

    @property
    def broken(self) -> bool:
        """Return whether no more migrations can be sent."""
        return self._task.done()

    async def opened(self) -> None:
        """Wait until the service has accepted the call. Raise grpc.aio.AioRpcError, or StreamLost if it did
        not in time."""
        if self._opened.done():
            self._opened.result()
        else:
            await asyncio.shield(self._opened)

    async def migrate(
        self, request: migration_pb2.MigrateRequest, within_s: float, on_change: OnChange | None = None
    ) -> migration_pb2.MigrationUpdate:
        """Return how the migration ended. The stream must be open.

        Raise StreamLost if that will never be known, or is not after so many seconds.
        """
        if self.broken:
            raise StreamLost("the stream has ended")
        number = self._count = self._count + 1
        end: asyncio.Future[migration_pb2.MigrationUpdate] = asyncio.get_running_loop().create_future()
        self._open[number] = _Sent(end, on_change)
        watched = on_change is not None
        self._unsent.append(migration_pb2.NumberedMigration(number=number, request=request, watched=watched))
        self._changed.set()
        try:
            async with asyncio.timeout(within_s):
                return await end
        except TimeoutError:
            raise StreamLost(f"it has not ended within {within_s:g} s") from None
        finally:
            self._open.pop(number, None)
            # It keeps an error, whose frames have it.
            del end

    async def close(self) -> None:
        """End the call; migrations continue in the service."""
        await cancel(self._task)

    async def _run(self) -> None:
        call = self._stub.Migrate()
        reason = "the stream has ended"
        try:
            async with asyncio.timeout(_OPEN_S):
                first = await call.read()
            if first is not grpc.aio.EOF:
                self._opened.set_result(None)
                await first_ended(self._send(call), self._receive(call))
        except grpc.aio.AioRpcError as error:
            reason = format_error(error)
            if not self._opened.done():
                self._opened.set_exception(error)
        except TimeoutError:
            reason = f"no reply within {_OPEN_S:g} s"
        finally:
            call.cancel()
            self._break(reason)

    async def _send(
        self,
        call: grpc.aio.StreamStreamCall[migration_pb2.MigrateManyRequest, migration_pb2.MigrateManyReply],
    ) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            migrations, self._unsent = self._unsent, []
            try:
                await call.write(migration_pb2.MigrateManyRequest(migrations=migrations))
            except asyncio.InvalidStateError:
                # The service has ended the call, without an error.
                return
            await asyncio.sleep(_GATHER_S)

    async def _receive(
        self,
        call: grpc.aio.StreamStreamCall[migration_pb2.MigrateManyRequest, migration_pb2.MigrateManyReply],
    ) -> None:
        while (reply := await call.read()) is not grpc.aio.EOF:
            if not isinstance(reply, migration_pb2.MigrateManyReply):
                # The other ends still come; these migrations run into their deadlines.
                unreadable("reply of a service", "of a migration service", "it cannot be decoded")
                continue
            for change in reply.changed:
                sent = self._open.get(change.number)
                if sent is not None and sent.on_change is not None:
                    sent.on_change(change.record)
            for end in reply.ended:
                sent = self._open.get(end.number)
                if sent is not None and not sent.end.done():
                    sent.end.set_result(end)

    def _break(self, reason: str) -> None:
        """Tell all who wait."""
        if not self._opened.done():
            self._opened.set_exception(StreamLost(reason))
        # Retrieved, so that asyncio does not log it if nobody waits.
        self._opened.exception()
        for sent in self._open.values():
            if not sent.end.done():
                sent.end.set_exception(StreamLost(reason))


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
        self, request: migration_pb2.MigrateRequest, on_change: OnChange | None = None
    ) -> migration_pb2.MigrationRecord:
        """Migrate, over a stream that all migrations share; return the record of the end. Cancelling does not
        abort the migration.

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
                end = await stream.migrate(request, MIGRATE_MAX_S, on_change)
            except StreamLost as error:
                # Once it may have begun there, it must not be started on another service.
                lost = f"migration service {service.service_id}: {error}"
                raise AdminError(_UNAVAILABLE, lost) from error
            if not end.code:
                return end.record
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
# States queued for a slow watcher; it may miss older ones, but never the end.
_STATES_MAX: Final = 64


class MigrationStarter:
    """Start migrations, at most one open migration per request."""

    def __init__(self, state: ReportedCluster, migrations: Migrations) -> None:
        self._state = state
        self._migrations = migrations

    def move(
        self,
        request: RequestView,
        target_id: str,
        reason: str,
        policy: str,
        mode: worker_pb2.CopyMode.ValueType,
    ) -> AsyncGenerator[migration_pb2.MigrationRecord]:
        """Enter the migration into the model; return a generator of its records until it is over.

        Raise AdminError, immediately or while iterating.
        """
        return self._watch(self._enter(request, target_id, reason, policy, mode, WhenFull.REFUSE))

    def order(
        self, request: RequestView, target_id: str, reason: str, policy: str, when_full: WhenFull
    ) -> Coroutine[None, None, bool]:
        """As `move`, with copy rounds, for a caller that needs to know only whether it was committed.

        `when_full` HOST acts like REFUSE here: whether host memory may take a request is up to the target's
        batch order.
        """
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
        # A paused request has one, whoever ordered it.
        if request.migrating or not self._state.order(MigrationOpened(request, target_id)):
            raise AdminError(_PRECONDITION, f"request {request.request_id}: a migration of it is open")
        return migration_pb2.MigrateRequest(
            request_id=request.request_id,
            source_instance_id=request.instance_id,
            target_instance_id=target_id,
            from_epoch=request.epoch,
            reason=reason,
            policy=policy,
            mode=mode,
            traceparent=self._state.traceparent(request.request_id),
            wait_for_room=when_full is WhenFull.WAIT,
        )

    async def _order(self, request: migration_pb2.MigrateRequest) -> bool:
        try:
            end = await self._migrations.migrate(request)
        finally:
            self._state.apply(MigrationClosed(request.request_id))
        return end.state == types_pb2.MIGRATION_STATE_COMMITTED

    async def _watch(
        self, request: migration_pb2.MigrateRequest
    ) -> AsyncGenerator[migration_pb2.MigrationRecord]:
        # None: there will be no more.
        states: asyncio.Queue[migration_pb2.MigrationRecord | None] = asyncio.Queue(_STATES_MAX)

        def put(state: migration_pb2.MigrationRecord | None) -> None:
            if states.full():
                states.get_nowait()
            states.put_nowait(state)

        ending = asyncio.create_task(self._migrations.migrate(request, put), name="watched migration")
        ending.add_done_callback(lambda _: put(None))
        try:
            while (state := await states.get()) is not None:
                yield state
            yield await ending
        finally:
            self._state.apply(MigrationClosed(request.request_id))
            await cancel(ending)
            task_error(ending)
            # It keeps an error, whose frames have it.
            del ending

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
        handover = handover_between(source.record.handover, tracked.record.handover)
        if handover.mode is TransferMode.STAYS:
            raise AdminError(_PRECONDITION, f"request {request.request_id} cannot move: {handover.reason}")
        if tracked.record.model_fingerprint != source.record.model_fingerprint:
            # The move is by replay, which needs the same model.
            models = difference(source.record.model_identity, tracked.record.model_identity)
            if models:
                raise AdminError(_PRECONDITION, f"{request.instance_id} and {target_id}: {models}")
        if request.phase is Phase.PREFILL:
            raise AdminError(
                _PRECONDITION,
                f"request {request.request_id} is in prefill; it can migrate once it is decoding",
            )
