"""Recent time between tokens over all of an engine's requests, cheap to update and to read."""

from __future__ import annotations

import math
from typing import Final

_WINDOW_S: Final = 1.0
# Buckets per octave: percentiles are at most 4.5% too high.
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
    """Mean and P99 over the last one to two seconds: the current second and the previous one.

    Written by one thread; another may read at any time and may miss the value being added.
    """

    def __init__(self) -> None:
        self._current = _Window()
        self._previous = _Window()
        self._until_s = 0.0

    def add(self, now_s: float, interval_ms: float, tokens: int = 1) -> None:
        """Add `tokens` intervals of `interval_ms` (above 0) that end now."""
        if now_s >= self._until_s:
            self._rotate(now_s)
        bucket = math.floor(math.log2(interval_ms) * _PER_OCTAVE) - _LOWEST
        bucket = min(max(bucket, 0), _BUCKETS - 1)
        window = self._current
        window.buckets[bucket] = window.buckets.get(bucket, 0) + tokens
        window.count += tokens
        window.total_ms += interval_ms * tokens

    def mean_and_p99_ms(self, now_s: float) -> tuple[float, float]:
        """Return mean and P99 over the window, zeros if it is empty. P99 is the upper end of its bucket."""
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

    def _rotate(self, now_s: float) -> None:
        recent = now_s < self._until_s + _WINDOW_S
        self._previous = self._current if recent else _Window()
        self._current = _Window()
        self._until_s = now_s + _WINDOW_S

    def _windows(self) -> list[tuple[_Window, float]]:
        """Return both windows, each with its end."""
        return [(self._previous, self._until_s - _WINDOW_S), (self._current, self._until_s)]
