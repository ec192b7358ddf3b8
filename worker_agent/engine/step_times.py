"""Recent durations of an engine's steps, an upper bound for a step, and recent times between tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from tailrace.intra.base import TokenIntervals

# Steps of at least this many tokens compute prompts; below, a step's duration hardly depends on their number.
LARGE_TOKENS: Final = 128
# Steps of each kind before there is an estimate; the first ones include compilation.
SMALL_STEPS_MIN: Final = 32
LARGE_STEPS_MIN: Final = 4
# The longest step is remembered for at least this many steps of its kind, and at most twice as many.
_WINDOW: Final = 512


class _RecentMax:
    """The largest value of the last _WINDOW to 2 * _WINDOW."""

    def __init__(self) -> None:
        self.count = 0
        self._older = 0.0
        self._newer = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        if self.count % _WINDOW == 0:
            self._older, self._newer = self._newer, 0.0
        self._newer = max(self._newer, value)

    @property
    def value(self) -> float:
        return max(self._older, self._newer)


class RecentStepTimes:
    """Written by the engine's thread, read by any thread."""

    def __init__(self) -> None:
        # Seconds per step, and seconds per token.
        self._small = _RecentMax()
        self._large = _RecentMax()

    def add(self, seconds: float, tokens: int) -> None:
        """Add a step that computed this many tokens; steps without tokens are ignored."""
        if tokens >= LARGE_TOKENS:
            self._large.add(seconds / tokens)
        elif tokens > 0:
            self._small.add(seconds)

    def expected_s(self, tokens: int) -> float | None:
        """Return the longest recent duration of a step of its kind, scaled to `tokens`; None if there were
        too few such steps."""
        if self._small.count < SMALL_STEPS_MIN:
            return None
        if tokens < LARGE_TOKENS:
            return self._small.value
        if self._large.count < LARGE_STEPS_MIN:
            return None
        return max(self._small.value, self._large.value * tokens)


_WINDOW_S: Final = 1.0
# Buckets per octave: percentiles are at most 4.5% too high.
_PER_OCTAVE: Final = 16
# From 1/64 ms to an hour and more.
_LOWEST: Final = -6 * _PER_OCTAVE
_BUCKETS: Final = 28 * _PER_OCTAVE


@dataclass(slots=True)
class _Window:
    buckets: dict[int, int] = field(default_factory=dict)
    count: int = 0
    total_ms: float = 0.0


# Intervals of a second before its mean counts as that of a batch.
_SHORTEST_TOKENS: Final = 32


class RecentIntervals:
    """Mean and P99 over the last one to two seconds: the current second and the previous one.

    Written by one thread; another may read at any time and may miss the value being added.
    """

    def __init__(self) -> None:
        self._current = _Window()
        self._previous = _Window()
        self._until_s = 0.0
        # The smallest mean of a second, in milliseconds.
        self._shortest_ms = math.inf

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
        windows = self._windows(now_s)
        count, mean_ms = _count_and_mean_ms(windows)
        if count == 0:
            return 0.0, 0.0
        above = count - math.ceil(count * 0.99)
        for bucket in sorted({b for w in windows for b in w.buckets.copy()}, reverse=True):
            above -= sum(window.buckets.get(bucket, 0) for window in windows)
            if above < 0:
                return mean_ms, float(2 ** ((bucket + _LOWEST + 1) / _PER_OCTAVE))
        return mean_ms, mean_ms

    def summary(self, now_s: float, epoch_s: float) -> TokenIntervals | None:
        """Return what a batch order is told, at `epoch_s` of its clock; None if the window is empty,
        or no second so far had enough intervals."""
        _, mean_ms = _count_and_mean_ms(self._windows(now_s))
        if not mean_ms or self._shortest_ms == math.inf:
            return None
        return TokenIntervals(epoch_s, mean_ms / 1e3, self._shortest_ms / 1e3)

    def _rotate(self, now_s: float) -> None:
        if self._current.count >= _SHORTEST_TOKENS:
            self._shortest_ms = min(self._shortest_ms, self._current.total_ms / self._current.count)
        recent = now_s < self._until_s + _WINDOW_S
        self._previous = self._current if recent else _Window()
        self._current = _Window()
        self._until_s = now_s + _WINDOW_S

    def _windows(self, now_s: float) -> list[_Window]:
        """Return those of both windows that are recent."""
        both = [(self._previous, self._until_s - _WINDOW_S), (self._current, self._until_s)]
        return [window for window, end_s in both if now_s < end_s + _WINDOW_S]


def _count_and_mean_ms(windows: Sequence[_Window]) -> tuple[int, float]:
    count = sum(window.count for window in windows)
    return count, sum(window.total_ms for window in windows) / count if count else 0.0
