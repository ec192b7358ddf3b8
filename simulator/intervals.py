"""Measure recent times between tokens over all requests of an instance, as workers report them."""

from __future__ import annotations

import math

from simulator.steplog import StepRun

_WINDOW_S = 1.0

# Number of tokens, and the sum of the seconds since the token before each.
IntervalSum = tuple[int, float]
_NO_INTERVALS: IntervalSum = (0, 0.0)


class StepRunIntervals:
    """Mean over the last one to two seconds: the current second and the one before.

    Like worker_agent.engine.step_times, but for whole runs of steps: each step's duration counts once for
    each request that decoded in it.
    """

    __slots__ = ("_before", "_now", "_second")

    def __init__(self) -> None:
        # Number of the current second; sums of that second and of the one before.
        self._second = 0
        self._now = _NO_INTERVALS
        self._before = _NO_INTERVALS

    def add(self, run: StepRun, steps: int, requests: int) -> None:
        """Add `steps` completed steps of a run in which `requests` requests decoded."""
        if not requests:
            return
        self._advance_to(_second_of(run.start_s + run.elapsed_s(steps)))
        begins = self._second * _WINDOW_S
        none = run.ended(begins - _WINDOW_S)
        before = min(steps, run.ended(begins))
        self._before = _add_steps(self._before, run, none, before, requests)
        self._now = _add_steps(self._now, run, before, steps, requests)

    def mean_s(self, now: float, run: StepRun, steps: int, requests: int) -> float:
        """Return the mean including `steps` steps of the current run, without adding them; 0.0 if no token
        was recent."""
        recent = StepRunIntervals()
        recent._second, recent._now, recent._before = self._second, self._now, self._before
        recent._advance_to(_second_of(now))
        recent.add(run, steps, requests)
        tokens = recent._before[0] + recent._now[0]
        return (recent._before[1] + recent._now[1]) / tokens if tokens else 0.0

    def _advance_to(self, second: int) -> None:
        if second > self._second:
            self._before = self._now if second == self._second + 1 else _NO_INTERVALS
            self._now = _NO_INTERVALS
            self._second = second


def _second_of(time_s: float) -> int:
    return math.floor(time_s / _WINDOW_S)


def _add_steps(sum_: IntervalSum, run: StepRun, begin: int, end: int, requests: int) -> IntervalSum:
    """Return the sum with the steps after number `begin` up to number `end` added."""
    if end <= begin:
        return sum_
    seconds = run.elapsed_s(end) - run.elapsed_s(begin)
    return sum_[0] + requests * (end - begin), sum_[1] + requests * seconds
