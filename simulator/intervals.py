"""Time between tokens lately, over all of an instance's requests, as a worker tells it."""

from __future__ import annotations

import math

from simulator.steprun import StepRun

_WINDOW_S = 1.0

# Tokens, and the sum of the seconds that each came after the one before it.
Sum = tuple[int, float]
_NONE: Sum = (0, 0.0)


class RecentIntervals:
    """Mean over the last one to two seconds: the second under way and the one before.

    As worker_agent.engine.intervals, but of whole runs of steps: each step's length counts once for each
    request that decoded in it.
    """

    __slots__ = ("_before", "_now", "_second")

    def __init__(self) -> None:
        # The second under way, by number; what was added in it and in the one before.
        self._second = 0
        self._now = _NONE
        self._before = _NONE

    def add(self, run: StepRun, steps: int, requests: int) -> None:
        """So many steps of a run have ended, in each of which so many requests decoded."""
        if not requests:
            return
        self._turn(_second_of(run.start_s + run.elapsed_s(steps)))
        begins = self._second * _WINDOW_S
        none = run.ended(begins - _WINDOW_S)
        before = min(steps, run.ended(begins))
        self._before = _plus(self._before, run, none, before, requests)
        self._now = _plus(self._now, run, before, steps, requests)

    def mean_s(self, now: float, run: StepRun, steps: int, requests: int) -> float:
        """With so many steps of the run under way; 0: no token was made lately. Changes nothing."""
        seen = RecentIntervals()
        seen._second, seen._now, seen._before = self._second, self._now, self._before
        seen._turn(_second_of(now))
        seen.add(run, steps, requests)
        tokens = seen._before[0] + seen._now[0]
        return (seen._before[1] + seen._now[1]) / tokens if tokens else 0.0

    def _turn(self, second: int) -> None:
        if second > self._second:
            self._before = self._now if second == self._second + 1 else _NONE
            self._now = _NONE
            self._second = second


def _second_of(time_s: float) -> int:
    return math.floor(time_s / _WINDOW_S)


def _plus(sum_: Sum, run: StepRun, begin: int, end: int, requests: int) -> Sum:
    """With the steps after number `begin` up to number `end`."""
    if end <= begin:
        return sum_
    seconds = run.elapsed_s(end) - run.elapsed_s(begin)
    return sum_[0] + requests * (end - begin), sum_[1] + requests * seconds
