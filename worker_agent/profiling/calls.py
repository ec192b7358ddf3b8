"""Worker.Profile: the measuring as a stream of events; who hangs up ends it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Final

from tailrace.messages import profile_message
from tailrace.records import ProfileRecord
from tailrace.v1 import profile_pb2
from worker_agent.profiling.profiler import BUDGET_S, Profiler

# More than a plan has steps; what nobody reads is not kept.
_NEWS_MAX: Final = 256


async def profile_events(
    profiler: Profiler, request: profile_pb2.ProfileRequest
) -> AsyncGenerator[profile_pb2.ProfileEvent]:
    """Raises Refused, MeasuringFailed, StoreUnavailable."""
    news: asyncio.Queue[str | None] = asyncio.Queue(_NEWS_MAX)

    def tell(text: str) -> None:
        if not news.full():
            news.put_nowait(text)

    async def run() -> ProfileRecord:
        try:
            return await profiler.profile(tell, force=request.force, budget_s=request.budget_s or BUDGET_S)
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
