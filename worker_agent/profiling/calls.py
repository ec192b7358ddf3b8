"""Worker.Profile: run the profiling and stream its progress; a client that disconnects cancels it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Final

from tailrace.messages import profile_message
from tailrace.records import ProfileRecord
from tailrace.v1 import profile_pb2
from worker_agent.profiling.profiler import BUDGET_S, Profiler

# More than the number of steps in a plan; further progress messages are dropped.
_NEWS_MAX: Final = 256


async def profile_events(
    profiler: Profiler, request: profile_pb2.ProfileRequest
) -> AsyncGenerator[profile_pb2.ProfileEvent]:
    """Yield progress messages, then the profile. Raise Refused, ProfilingFailed or StoreUnavailable."""
    news: asyncio.Queue[str | None] = asyncio.Queue(_NEWS_MAX)

    def report(text: str) -> None:
        if not news.full():
            news.put_nowait(text)

    async def run() -> ProfileRecord:
        try:
            return await profiler.profile(report, force=request.force, budget_s=request.budget_s or BUDGET_S)
        finally:
            if news.full():
                news.get_nowait()
            news.put_nowait(None)

    task = asyncio.create_task(run(), name="profiling")
    try:
        while (text := await news.get()) is not None:
            yield profile_pb2.ProfileEvent(message=text)
        yield profile_pb2.ProfileEvent(profile=profile_message(await task))
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
