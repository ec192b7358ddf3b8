"""Time between tokens lately, over all of an engine's requests: cheap to add to, cheap to read."""

from __future__ import annotations

import math
from typing import Final

_WINDOW_S: Final = 1.0
# Buckets an octave: a percentile is told at most 4.5% too high.
_PER_OCTAVE: Final = 16
# From 1/64 ms to an hour and more.
_LOWEST: Final = -6 * _PER_OCTAVE
_BUCKETS: Final = 28 * _PER_OCTAVE


class _Window:
    __slots__ = ("buckets", "count", "total_ms")

    def __init__(self) -> None:
        self.buckets: dict[int, int] = {}
        self.count = 0
        self.total_ms = 0.0


class RecentIntervals:
    """Mean and P99 over the last one to two seconds: the second under way and the one before.

    Written by one thread; another may read meanwhile and then misses what is being added.
    """

    def __init__(self) -> None:
        self._now = _Window()
        self._before = _Window()
        self._until_s = 0.0

    def add(self, now_s: float, interval_ms: float, tokens: int = 1) -> None:
        """So many tokens came now, each this long after the one before it (above 0) of its request."""
        if now_s >= self._until_s:
            self._turn(now_s)
        bucket = math.floor(math.log2(interval_ms) * _PER_OCTAVE) - _LOWEST
        bucket = min(max(bucket, 0), _BUCKETS - 1)
        window = self._now
        window.buckets[bucket] = window.buckets.get(bucket, 0) + tokens
        window.count += tokens
        window.total_ms += interval_ms * tokens

    def mean_and_p99_ms(self, now_s: float) -> tuple[float, float]:
        """Over the window; zeros when it is empty. P99 is the upper end of its bucket."""
        windows = [w for w, end_s in self._windows() if now_s < end_s + _WINDOW_S]
        count = sum(window.count for window in windows)
        if count == 0:
            return 0.0, 0.0
        mean_ms = sum(window.total_ms for window in windows) / count
        above = count - math.ceil(count * 0.99)
        for bucket in sorted({b for w in windows for b in w.buckets.copy()}, reverse=True):
            above -= sum(window.buckets.get(bucket, 0) for window in windows)
            if above < 0:
                return mean_ms, float(2 ** ((bucket + _LOWEST + 1) / _PER_OCTAVE))
        return mean_ms, mean_ms

    def _turn(self, now_s: float) -> None:
        recent = now_s < self._until_s + _WINDOW_S
        self._before = self._now if recent else _Window()
        self._now = _Window()
        self._until_s = now_s + _WINDOW_S

    def _windows(self) -> list[tuple[_Window, float]]:
        """The two windows, each with its end."""
        return [(self._before, self._until_s - _WINDOW_S), (self._now, self._until_s)]
