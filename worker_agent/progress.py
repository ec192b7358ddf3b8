"""Notices an engine that has requests to run and ends no step.

A process that dies or stands still is noticed by the front ends. An engine that hangs in its own thread (a
device, a lock) is not: the event loop beside it goes on saying that all is well. Its worker then has to say
that it is not, and end.

How long is too long follows from the steps so far: ten times the longest that a step of as many tokens
took, but never less than a floor (a kernel may be compiled in mid-life) and never more than a limit,
which also holds while too little was measured: the first steps compile, and the first long prompts take
what nobody has seen yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from worker_agent.engine.base import EngineStats

# A step may take so many times what the longest of its kind took.
_TIMES: Final = 10.0
_CHECKS_PER_FLOOR: Final = 10
_CHECK_MOST_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class StepBounds:
    """Seconds that a step may take: at least `floor_s`, at most `limit_s`, in between by what was
    measured."""

    floor_s: float
    limit_s: float

    def most_s(self, expected_s: float | None) -> float:
        """Of a step that should take `expected_s` at most; None: nobody knows."""
        if expected_s is None:
            return self.limit_s
        return min(self.limit_s, max(self.floor_s, _TIMES * expected_s))


class Progress:
    """Pure: the caller brings the engine's numbers and the time, in seconds of a monotonic clock."""

    def __init__(self, bounds: StepBounds, now_s: float) -> None:
        self._bounds = bounds
        self._steps = -1
        self._moved_s = now_s

    def extend_deadlines(self, seconds: float) -> None:
        """This process itself stood still for so long: no step could end."""
        self._moved_s += seconds

    def stuck(self, stats: EngineStats, now_s: float) -> float | None:
        """If requests run and no step has ended for too long: for how many seconds; else None."""
        idle = not any(request.state == "running" for request in stats.requests)
        if idle or stats.steps != self._steps:
            self._steps, self._moved_s = stats.steps, now_s
            return None
        stood_s = now_s - self._moved_s
        return stood_s if stood_s > self._bounds.most_s(stats.expected_step_s) else None


async def watch_progress(
    stats: Callable[[], EngineStats], bounds: StepBounds, on_stuck: Callable[[str], None]
) -> None:
    """Look until the engine is stuck, and say so once; or until cancelled."""
    loop = asyncio.get_running_loop()
    progress, interval_s = (
        Progress(bounds, loop.time()),
        min(_CHECK_MOST_S, bounds.floor_s / _CHECKS_PER_FLOOR),
    )
    while True:
        due_s = loop.time() + interval_s
        await asyncio.sleep(interval_s)
        progress.extend_deadlines(max(0.0, loop.time() - due_s))
        stood_s = progress.stuck(stats(), loop.time())
        if stood_s is not None:
            on_stuck(f"the engine hangs: it has requests to run and ended no step for {stood_s:.3g} s")
            return
