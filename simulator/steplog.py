"""An instance's steps so far, as runs of steps whose durations grow evenly.

Step number k of an instance (from 1) ends at boundary k. A run that begins at boundary b and time t has
steps of d, d + i, d + 2i, ... seconds, so its j-th step ends at t + j d + i j (j - 1) / 2. Requests keep only
the boundaries between which they decoded; the times of their tokens are read off here.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def elapsed(first_s: float, increment_s: float, steps: int) -> float:
    """Seconds from the start of a run to the end of its step number `steps`."""
    return first_s * steps + increment_s * (steps * (steps - 1) // 2)


def steps_within(first_s: float, increment_s: float, seconds: float, most: int) -> int:
    """Most steps, up to `most`, that end within `seconds` of the start of a run."""
    if seconds < first_s:
        return 0
    half = increment_s / 2
    linear = first_s - half
    # The stable form of the positive root; increments may be zero.
    root = 2 * seconds / (linear + math.sqrt(linear * linear + 4 * half * seconds))
    steps = min(int(root), most)
    while steps < most and elapsed(first_s, increment_s, steps + 1) <= seconds:
        steps += 1
    while steps > 0 and elapsed(first_s, increment_s, steps) > seconds:
        steps -= 1
    return steps


class StepLog:
    """Runs in order. The last may be open: its number of steps is not known yet."""

    __slots__ = ("_boundaries", "_columns", "_counts", "_size")

    def __init__(self) -> None:
        self._boundaries: Ints = np.zeros(256, np.int64)
        self._counts: Ints = np.zeros(256, np.int64)
        # End of the first step, interval to the end of the second, growth of the interval; one column a run.
        self._columns: Floats = np.zeros((3, 256), np.float64)
        self._size = 0

    def open(self, boundary: int, start_s: float, first_s: float, increment_s: float) -> None:
        """A run begins."""
        size = self._size
        if size == len(self._boundaries):
            self._boundaries = np.concatenate([self._boundaries, np.zeros_like(self._boundaries)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._columns = np.concatenate([self._columns, np.zeros_like(self._columns)], axis=1)
        self._boundaries[size] = boundary
        self._columns[:, size] = (start_s + first_s, first_s + increment_s, increment_s)
        self._size = size + 1

    def close(self, steps: int) -> None:
        """The open run has ended after this many steps."""
        self._counts[self._size - 1] = steps

    def between(self, start: int, end: int) -> TokenTimes:
        """Tokens made by the steps after boundary `start` up to boundary `end`; closed runs only."""
        boundaries = self._boundaries[: self._size]
        low = int(boundaries.searchsorted(start, "right")) - 1
        high = int(boundaries.searchsorted(end, "left"))
        # Only the first run and the last are cut.
        counts = self._counts[low:high].copy()
        counts[-1] = min(int(counts[-1]), end - int(boundaries[high - 1]))
        first_s, interval_s, increment_s = self._columns[:, low:high]
        made = start - int(boundaries[low])
        if made:
            first_s, interval_s = first_s.copy(), interval_s.copy()
            counts[0] -= made
            increment = float(increment_s[0])
            first_s[0] += float(interval_s[0]) * made + increment * (made * (made - 1) // 2)
            interval_s[0] += increment * made
        return TokenTimes(first_s, interval_s, increment_s, counts)


class TokenTimes:
    """Times of tokens, as runs: first token, interval to the second, growth of the interval, count."""

    __slots__ = ("counts", "first_s", "increment_s", "interval_s")

    def __init__(self, first_s: Floats, interval_s: Floats, increment_s: Floats, counts: Ints) -> None:
        self.first_s = first_s
        self.interval_s = interval_s
        self.increment_s = increment_s
        self.counts = counts

    @staticmethod
    def joined(parts: list[TokenTimes]) -> TokenTimes:
        """All the parts, in order."""
        if len(parts) == 1:
            return parts[0]
        return TokenTimes(
            np.concatenate([part.first_s for part in parts]),
            np.concatenate([part.interval_s for part in parts]),
            np.concatenate([part.increment_s for part in parts]),
            np.concatenate([part.counts for part in parts]),
        )

    @property
    def last_s(self) -> Floats:
        """Time of each run's last token."""
        gaps = self.counts - 1
        return self.first_s + self.interval_s * gaps + self.increment_s * (gaps * (gaps - 1) // 2)

    def each(self) -> Floats:
        """The time of every token; for tests and small cases."""
        rows = [
            first + interval * np.arange(n) + increment * (np.arange(n) * (np.arange(n) - 1) // 2)
            for first, interval, increment, n in zip(
                self.first_s, self.interval_s, self.increment_s, self.counts, strict=True
            )
        ]
        return np.concatenate(rows) if rows else np.zeros(0)
