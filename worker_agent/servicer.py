"""The gRPC Worker service."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator
from functools import partial

import grpc

from tailrace.security.handlers import Context
from tailrace.service.tasks import cancel, run_once
from tailrace.store.client import StoreUnavailable
from tailrace.v1 import profile_pb2, worker_pb2, worker_pb2_grpc
from worker_agent.draining import Returns
from worker_agent.migration.export_call import Lease
from worker_agent.migration.source import Exports
from worker_agent.migration.target import ImportRefused, Imports
from worker_agent.profiling.profiler import Profiler, ProfilingFailed, Refused, profile_events
from worker_agent.registration import Addressee

log = logging.getLogger(__name__)


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """Implement the Worker service.

    The streaming methods write through their context: they are coroutines, where the generated base class
    expects iterators.
    """

    def __init__(
        self,
        own: Addressee,
        exports: Exports,
        imports: Imports,
        returns: Returns,
        profiler: Profiler,
    ) -> None:
        self._own = own
        self._returns = returns
        self._exports = exports
        self._imports = imports
        self._profiler = profiler

    async def Export(  # type: ignore[override]
        self,
        request_iterator: AsyncIterator[worker_pb2.ExportCommand],
        context: grpc.aio.ServicerContext[worker_pb2.ExportCommand, worker_pb2.ExportEvent],
    ) -> None:
        """Serve the source side of a migration; the call is its lease."""
        lease = Lease()
        self._exports.start(lease)
        reader = run_once("export readers", partial(_read, request_iterator, lease))
        try:
            while (event := await lease.next_event()) is not None:
                await context.write(event)
        finally:
            lease.break_off("the target is gone")
            await cancel(reader)

    async def Import(  # type: ignore[override]
        self,
        request: worker_pb2.ImportRequest,
        context: grpc.aio.ServicerContext[worker_pb2.ImportRequest, worker_pb2.ImportEvent],
    ) -> None:
        """Run the target side of a migration; cancelling the call before the commit aborts it."""
        await _require_seconds(context, timeout_s=request.timeout_s, room_wait_s=request.room_wait_s)
        try:
            incoming = self._imports.start(request)
        except ImportRefused as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
            return
        try:
            async for event in incoming.events():
                await context.write(event)
        finally:
            incoming.cancel("the migration service is gone")

    async def CancelImport(
        self,
        request: worker_pb2.CancelImportRequest,
        context: grpc.aio.ServicerContext[worker_pb2.CancelImportRequest, worker_pb2.CancelImportReply],
    ) -> worker_pb2.CancelImportReply:
        """Abort an import that is not being committed; reply once it has ended."""
        return worker_pb2.CancelImportReply(end=await self._imports.cancel(request.migration_id))

    async def HandBackPrompts(
        self,
        request: worker_pb2.HandBackPromptsRequest,
        context: grpc.aio.ServicerContext[worker_pb2.HandBackPromptsRequest, worker_pb2.HandBackPromptsReply],
    ) -> worker_pb2.HandBackPromptsReply:
        """Hand prompts back to their front ends, which place them again."""
        count = self._returns.return_prompts(request.request_ids, asyncio.get_running_loop().time())
        return worker_pb2.HandBackPromptsReply(returned=count)

    async def Profile(  # type: ignore[override]
        self,
        request: profile_pb2.ProfileRequest,
        context: grpc.aio.ServicerContext[profile_pb2.ProfileRequest, profile_pb2.ProfileEvent],
    ) -> None:
        """Profile the engine; ends when the caller disconnects."""
        if refusal := self._own.refusal(request.instance_id):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, refusal)
        # 0: the default.
        await _require_seconds(context, budget_s=request.budget_s)
        try:
            async with contextlib.aclosing(profile_events(self._profiler, request)) as events:
                async for event in events:
                    await context.write(event)
        except Refused as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except ProfilingFailed as error:
            await context.abort(grpc.StatusCode.ABORTED, str(error))
        except StoreUnavailable as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))


async def _read(commands: AsyncIterator[worker_pb2.ExportCommand], lease: Lease) -> None:
    try:
        async for command in commands:
            lease.inbox.command(command)
    except grpc.aio.BaseError as error:
        log.debug("the call of an export ended: %s", error)
    finally:
        lease.break_off("the target closed the export")


async def _require_seconds(context: Context, **fields: float) -> None:
    """Abort the call if a field is not a valid number of seconds: timers do not accept NaN."""
    for name, seconds in fields.items():
        if not 0.0 <= seconds < math.inf:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, f"{name}: must be a number of seconds, not {seconds}"
            )
