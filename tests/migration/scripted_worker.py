"""A worker whose imports follow a script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import cast

import grpc

from tailrace.v1 import profile_pb2, types_pb2, worker_pb2, worker_pb2_grpc

PRE_COPY = types_pb2.MIGRATION_STATE_PRE_COPY
STOP_AND_COPY = types_pb2.MIGRATION_STATE_STOP_AND_COPY
COMMITTED = types_pb2.MIGRATION_STATE_COMMITTED
ABORTED = types_pb2.MIGRATION_STATE_ABORTED
GONE = types_pb2.MIGRATION_STATE_GONE
UNKNOWN = types_pb2.MIGRATION_STATE_UNKNOWN


class ScriptedWorker(worker_pb2_grpc.WorkerServicer):
    """Answers each Import with the steps in `script`: events, bytes, "hang" or "linger".

    The first ones end with the statuses in `refusals`.
    """

    def __init__(self) -> None:
        self.script: list[worker_pb2.ImportEvent | bytes | str] = []
        self.refusals: list[grpc.StatusCode] = []
        self.imports: asyncio.Queue[worker_pb2.ImportRequest] = asyncio.Queue()
        self.cancelled_calls = asyncio.Event()
        # What a migration service is told that asks how an import ended.
        self.end: worker_pb2.ImportEvent | None = worker_pb2.ImportEvent(state=ABORTED, reason="cancelled")

    async def Import(
        self,
        request: worker_pb2.ImportRequest,
        context: grpc.aio.ServicerContext[worker_pb2.ImportRequest, worker_pb2.ImportEvent],
    ) -> AsyncIterator[worker_pb2.ImportEvent]:
        self.imports.put_nowait(request)
        if self.refusals:
            await context.abort(self.refusals.pop(0), "refused")
        for step in self.script:
            if step == "hang":
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    self.cancelled_calls.set()
                    raise
            elif step == "linger":
                # Some iterations of the event loop.
                for _ in range(100):
                    await asyncio.sleep(0)
            elif isinstance(step, worker_pb2.ImportEvent):
                yield step
            elif isinstance(step, bytes):
                yield cast(worker_pb2.ImportEvent, step)

    async def CancelImport(
        self,
        request: worker_pb2.CancelImportRequest,
        context: grpc.aio.ServicerContext[worker_pb2.CancelImportRequest, worker_pb2.CancelImportReply],
    ) -> worker_pb2.CancelImportReply:
        return worker_pb2.CancelImportReply(end=self.end)

    async def HandBackPrompts(
        self,
        request: worker_pb2.HandBackPromptsRequest,
        context: grpc.aio.ServicerContext[worker_pb2.HandBackPromptsRequest, worker_pb2.HandBackPromptsReply],
    ) -> worker_pb2.HandBackPromptsReply:
        raise NotImplementedError("no prompts wait on this worker")

    def Export(
        self,
        request_iterator: AsyncIterator[worker_pb2.ExportCommand],
        context: grpc.aio.ServicerContext[worker_pb2.ExportCommand, worker_pb2.ExportEvent],
    ) -> AsyncIterator[worker_pb2.ExportEvent]:
        raise NotImplementedError("not used by tests")

    def Profile(
        self,
        request: profile_pb2.ProfileRequest,
        context: grpc.aio.ServicerContext[profile_pb2.ProfileRequest, profile_pb2.ProfileEvent],
    ) -> AsyncIterator[profile_pb2.ProfileEvent]:
        raise NotImplementedError("not used by tests")


def commit(rounds: int = 2) -> list[worker_pb2.ImportEvent | bytes | str]:
    """Return the events of a migration that commits after this many copy rounds."""
    round_events = [
        worker_pb2.ImportEvent(
            state=PRE_COPY if number < rounds else STOP_AND_COPY,
            round=worker_pb2.CopyRound(number=number, blocks=10, bytes=1000, ms=1.0),
        )
        for number in range(1, rounds + 1)
    ]
    end = worker_pb2.ImportEvent(
        state=COMMITTED, pause_ms=4.0, pause_steps=2.0, phase=types_pb2.PHASE_REASONING, tokens=100
    )
    return [*round_events, end]
