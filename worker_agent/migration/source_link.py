"""The target's connection to its source: one Export stream."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

import grpc

from tailrace.service.channels import format_error
from tailrace.service.tasks import run_to_completion, task_error
from tailrace.v1 import worker_pb2, worker_pb2_grpc

log = logging.getLogger(__name__)


class SourceLost(Exception):
    """The stream to the source broke, or the source violated the protocol."""


class SourceFailed(Exception):
    """The source reports that it cannot export; the message says why.

    `gone`: the request is not there (any more).
    """

    def __init__(self, reason: str, gone: bool = False) -> None:
        super().__init__(reason)
        self.gone = gone


class SourceLink(Protocol):
    """Send commands to the source, with one reply each."""

    async def ask(self, command: worker_pb2.ExportCommand) -> worker_pb2.ExportEvent:
        """Send a command and return the reply. Raise SourceLost or SourceFailed."""

    async def failure(self) -> None:
        """Wait for an event that nobody asked for. Raise SourceLost or SourceFailed."""

    async def end(self, committed: bool, reason: str) -> None:
        """Tell the source how the import ended, and close. Errors are ignored."""

    def drop(self) -> None:
        """Close without telling the source, which finds out by itself how it ended."""


class GrpcSourceLink:
    """Implement SourceLink over gRPC.

    A cancelled read would cancel the call, and with it the chance to report how the import ended. So each
    reply is awaited in a task of its own, which `end` and `drop` clean up.
    """

    def __init__(self, channel: grpc.aio.Channel, timeout_s: float) -> None:
        """`timeout_s`: for the whole export."""
        self._call = worker_pb2_grpc.WorkerStub(channel).Export(timeout=timeout_s)
        self._reading: asyncio.Task[object] | None = None

    async def ask(self, command: worker_pb2.ExportCommand) -> worker_pb2.ExportEvent:
        """See SourceLink.ask."""
        try:
            await run_to_completion(self._call.write(command))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise SourceLost(format_error(error)) from error
        return await self._next()

    async def failure(self) -> None:
        """See SourceLink.failure."""
        await self._next()
        raise SourceLost("the source sent an event that was not asked for")

    async def _next(self) -> worker_pb2.ExportEvent:
        try:
            event = await asyncio.shield(self._read())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise SourceLost(format_error(error)) from error
        if not isinstance(event, worker_pb2.ExportEvent):
            raise SourceLost("the source closed the export")
        if event.HasField("failed"):
            raise SourceFailed(event.failed.reason, event.failed.gone)
        return event

    async def end(self, committed: bool, reason: str) -> None:
        """See SourceLink.end."""
        end = worker_pb2.ExportEnd(committed=committed, reason=reason)
        try:
            await self._call.write(worker_pb2.ExportCommand(end=end))
            await self._call.done_writing()
            # The source closes once it has processed this.
            while isinstance(await self._read(), worker_pb2.ExportEvent):
                pass
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            log.debug("ending an export: %s", format_error(error))
        finally:
            self.drop()

    def drop(self) -> None:
        """See SourceLink.drop."""
        self._call.cancel()

    def _read(self) -> asyncio.Task[object]:
        """Return the pending read, or begin a new one."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read_one(), name="export answer")
            self._reading.add_done_callback(self._read_ended)
        return self._reading

    async def _read_one(self) -> object:
        return await self._call.read()

    def _read_ended(self, task: asyncio.Task[object]) -> None:
        if self._reading is task:
            self._reading = None
        # Nobody may be waiting for it any more.
        task_error(task)
