"""Detect an engine that has requests to run but finishes no step.

Front ends notice a process that dies or is suspended. They do not notice an engine that hangs in its own
thread (a device, a lock), because the event loop beside it still sends heartbeats. The worker then has to
report the failure and exit.

The limit follows from the steps so far: ten times the longest that a step with as many tokens took, but never
below a floor and never above a limit, which also applies while too little was measured (the first long
prompts take an unknown time) and while the engine compiles code, which a request may need at any time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from worker_agent.engine.base import EngineStats

# A step may take this many times as long as the longest of its kind.
_LONGEST_STEP_FACTOR: Final = 10.0
_CHECKS_PER_FLOOR: Final = 10
_CHECK_MAX_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class StepBounds:
    """Seconds that a step may take: between `floor_s` and `limit_s`, depending on measurements."""

    floor_s: float
    limit_s: float

    def max_s(self, expected_s: float | None) -> float:
        """Return the longest a step may take that should take `expected_s` at most; None: unknown."""
        if expected_s is None:
            return self.limit_s
        return min(self.limit_s, max(self.floor_s, _LONGEST_STEP_FACTOR * expected_s))


class StepProgress:
    """Track the engine's steps. Pure: callers pass the statistics and the time in monotonic seconds."""

    def __init__(self, bounds: StepBounds, now_s: float) -> None:
        self.bounds = bounds
        self._finished = (-1, -1)
        self._last_step_s = now_s
        # Steps at the last check, and whether there were requests to run.
        self.steps = 0
        self.running = False

    def extend_deadlines(self, seconds: float) -> None:
        """Allow more time: this process was suspended for `seconds`, in which no step could finish."""
        self._last_step_s += seconds

    def stuck_for_s(self, stats: EngineStats, now_s: float) -> float | None:
        """Return for how many seconds no step has finished although requests run, if that is too long; else
        None."""
        self.steps = stats.steps
        self.running = any(request.state == "running" for request in stats.requests)
        finished = (stats.steps, stats.compilations)
        if not self.running or finished != self._finished:
            self._finished, self._last_step_s = finished, now_s
            return None
        stuck_s = now_s - self._last_step_s
        max_s = self.bounds.max_s(None if stats.compiling else stats.expected_step_s)
        return stuck_s if stuck_s > max_s else None


async def watch_progress(
    stats: Callable[[], EngineStats], progress: StepProgress, on_stuck: Callable[[str], None]
) -> None:
    """Check periodically; call `on_stuck` once if the engine is stuck, then return. Run until cancelled."""
    loop = asyncio.get_running_loop()
    interval_s = min(_CHECK_MAX_S, progress.bounds.floor_s / _CHECKS_PER_FLOOR)
    while True:
        due_s = loop.time() + interval_s
        await asyncio.sleep(interval_s)
        progress.extend_deadlines(max(0.0, loop.time() - due_s))
        stuck_s = progress.stuck_for_s(stats(), loop.time())
        if stuck_s is not None:
            on_stuck(f"the engine hangs: it has requests to run but finished no step for {stuck_s:.3g} s")
            return
