"""Notices an engine that has requests to run and ends no step.

A process that dies or stands still is noticed by the front ends. An engine that hangs in its own thread (a
device, a lock) is not: the event loop beside it goes on saying that all is well. Its worker then has to say
that it is not, and end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from worker_agent.engine.base import EngineStats

_LOOKS_A_LIMIT: Final = 10


class Progress:
    """Pure: the caller brings the engine's numbers and the time, in seconds of a monotonic clock."""

    def __init__(self, limit_s: float, now_s: float) -> None:
        """`limit_s`: most seconds that a step may take."""
        self._limit_s = limit_s
        self._steps = -1
        self._moved_s = now_s

    def excuse(self, seconds: float) -> None:
        """This process itself stood still for so long: no step could end."""
        self._moved_s += seconds

    def stuck(self, stats: EngineStats, now_s: float) -> bool:
        """Whether requests run, and no step has ended for too long."""
        idle = not any(request.state == "running" for request in stats.requests)
        if idle or stats.steps != self._steps:
            self._steps, self._moved_s = stats.steps, now_s
            return False
        return now_s - self._moved_s > self._limit_s


async def watch_progress(
    stats: Callable[[], EngineStats], limit_s: float, on_stuck: Callable[[str], None]
) -> None:
    """Look until the engine is stuck, and say so once; or until cancelled."""
    loop = asyncio.get_running_loop()
    progress, interval_s = Progress(limit_s, loop.time()), limit_s / _LOOKS_A_LIMIT
    while True:
        due_s = loop.time() + interval_s
        await asyncio.sleep(interval_s)
        progress.excuse(max(0.0, loop.time() - due_s))
        if progress.stuck(stats(), loop.time()):
            on_stuck(f"the engine hangs: it has requests to run and ended no step for {limit_s:g} s")
            return
