"""One stream of migrations to a migration service, and of their ends back."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import grpc

from tailrace.service.channels import format_error
from tailrace.service.tasks import cancel, first_ended, run_once
from tailrace.telemetry.incidents import unreadable
from tailrace.v1 import migration_pb2

if TYPE_CHECKING:
    from tailrace.v1.migration_pb2_grpc import MigrationAsyncStub

_OPEN_S: Final = 5.0
# Seconds between two messages: each costs both sides as much as a dozen migrations.
_GATHER_S: Final = 0.005


class StreamLost(Exception):
    """The stream broke after the migration was sent; the message says how. It may have begun."""


class MigrationStream:
    """Migrate over one MigrateMany call, which begins at once. Once broken, it stays so."""

    def __init__(self, stub: MigrationAsyncStub) -> None:
        self._stub = stub
        loop = asyncio.get_running_loop()
        self._opened: asyncio.Future[None] = loop.create_future()
        self._count = 0
        self._unsent: list[migration_pb2.NumberedMigration] = []
        self._changed = asyncio.Event()
        self._open: dict[int, asyncio.Future[migration_pb2.MigrationEnd]] = {}
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
        self, request: migration_pb2.MigrateRequest, within_s: float
    ) -> migration_pb2.MigrationEnd:
        """Return how the migration ended. The stream must be open.

        Raise StreamLost if that will never be known, or is not after so many seconds.
        """
        if self.broken:
            raise StreamLost("the stream has ended")
        number = self._count = self._count + 1
        end: asyncio.Future[migration_pb2.MigrationEnd] = asyncio.get_running_loop().create_future()
        self._open[number] = end
        self._unsent.append(migration_pb2.NumberedMigration(number=number, request=request))
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
        call = self._stub.MigrateMany()
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
            for end in reply.ended:
                waiting = self._open.get(end.number)
                if waiting is not None and not waiting.done():
                    waiting.set_result(end)

    def _break(self, reason: str) -> None:
        """Tell all who wait."""
        if not self._opened.done():
            self._opened.set_exception(StreamLost(reason))
        # Retrieved, so that asyncio does not log it if nobody waits.
        self._opened.exception()
        for end in self._open.values():
            if not end.done():
                end.set_exception(StreamLost(reason))
