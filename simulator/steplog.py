"""The steps of an instance so far, as runs of steps whose durations grow linearly.

Step number k of an instance (counted from 1) ends at boundary k. A run that begins at boundary b and time t
has steps of d, d + i, d + 2i, ... seconds, so its j-th step ends at t + j d + i j (j - 1) / 2. Requests keep
only the boundaries between which they decoded; their token times are derived from the log.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def elapsed(first_s: float, increment_s: float, steps: int) -> float:
    """Return the seconds from the start of a run to the end of its step number `steps`."""
    return first_s * steps + increment_s * (steps * (steps - 1) // 2)


def steps_within(first_s: float, increment_s: float, seconds: float, limit: int) -> int:
    """Return the number of steps, at most `limit`, that end within `seconds` of the start of a run."""
    if seconds < first_s:
        return 0
    half = increment_s / 2
    linear = first_s - half
    # The numerically stable form of the positive root; increments may be zero.
    steps = int(2 * seconds / (linear + math.sqrt(linear * linear + 4 * half * seconds)))
    if steps > limit:
        steps = limit
    # Correct rounding. `elapsed` is inlined: this function is called most often of all.
    while steps < limit and first_s * (steps + 1) + increment_s * ((steps + 1) * steps // 2) <= seconds:
        steps += 1
    while steps > 0 and first_s * steps + increment_s * (steps * (steps - 1) // 2) > seconds:
        steps -= 1
    return steps


class StepLog:
    """Runs in order. The last one may be open, without a known number of steps."""

    __slots__ = ("_boundaries", "_runs")

    def __init__(self) -> None:
        self._boundaries = array("q")
        self._runs = TokenTimes()

    def open(self, boundary: int, start_s: float, first_s: float, increment_s: float) -> None:
        """Begin a run at a boundary."""
        runs = self._runs
        self._boundaries.append(boundary)
        runs.first_s.append(start_s + first_s)
        runs.interval_s.append(first_s + increment_s)
        runs.increment_s.append(increment_s)
        runs.counts.append(0)

    def close(self, steps: int) -> None:
        """End the open run after this many steps."""
        self._runs.counts[-1] = steps

    def copy(self, start: int, end: int, to: TokenTimes) -> None:
        """Append the tokens of the steps after boundary `start` up to boundary `end`, which must be in closed
        runs."""
        boundaries, runs = self._boundaries, self._runs
        low = bisect_right(boundaries, start) - 1
        high = bisect_left(boundaries, end, low)
        first = len(to.counts)
        to.first_s += runs.first_s[low:high]
        to.interval_s += runs.interval_s[low:high]
        to.increment_s += runs.increment_s[low:high]
        to.counts += runs.counts[low:high]
        # Only the first and the last run are cut.
        to.counts[-1] = min(to.counts[-1], end - boundaries[high - 1])
        skipped = start - boundaries[low]
        if skipped:
            to.counts[first] -= skipped
            increment_s = to.increment_s[first]
            to.first_s[first] += to.interval_s[first] * skipped + increment_s * (skipped * (skipped - 1) // 2)
            to.interval_s[first] += increment_s * skipped


class TokenTimes:
    """Times of tokens, as runs: first token, interval to the second, growth of the interval, count.

    Columns are arrays, because there are many instances of this class, most of them short.
    """

    __slots__ = ("counts", "first_s", "increment_s", "interval_s")

    def __init__(self) -> None:
        self.first_s = array("d")
        self.interval_s = array("d")
        self.increment_s = array("d")
        self.counts = array("q")

    def __len__(self) -> int:
        """Return the number of runs, not of tokens."""
        return len(self.counts)

    def columns(self) -> tuple[Floats, Floats, Floats, Ints]:
        """Return the columns as numpy arrays: first token, interval, growth, count. Append nothing
        afterwards."""
        return (
            np.frombuffer(self.first_s),
            np.frombuffer(self.interval_s),
            np.frombuffer(self.increment_s),
            np.frombuffer(self.counts, np.int64),
        )

    def all_s(self) -> Floats:
        """Return the time of every token; for tests and small cases."""
        rows = [
            first + interval * np.arange(n) + increment * (np.arange(n) * (np.arange(n) - 1) // 2)
            for first, interval, increment, n in zip(
                self.first_s, self.interval_s, self.increment_s, self.counts, strict=True
            )
        ]
        return np.concatenate(rows) if rows else np.zeros(0)


def last_s(first_s: Floats, interval_s: Floats, increment_s: Floats, counts: Ints) -> Floats:
    """Return the time of each run's last token."""
    gaps = counts - 1
    times: Floats = first_s + interval_s * gaps + increment_s * (gaps * (gaps - 1) // 2)
    return times


class StepRun:
    """Steps since `start_s`: the first takes `first_s`, each next one `increment_s` more; no steps: idle."""

    __slots__ = ("first_s", "increment_s", "start_s", "steps")

    def __init__(
        self, start_s: float = 0.0, first_s: float = 0.0, increment_s: float = 0.0, steps: int = 0
    ) -> None:
        self.start_s = start_s
        self.first_s = first_s
        self.increment_s = increment_s
        self.steps = steps

    def ended(self, now: float) -> int:
        """Return the number of steps that have ended by `now`."""
        seconds = now - self.start_s
        if not self.steps or seconds < self.first_s:
            return 0
        return steps_within(self.first_s, self.increment_s, seconds, self.steps)

    def elapsed_s(self, steps: int) -> float:
        """Return the seconds from the start to the end of step number `steps`."""
        return elapsed(self.first_s, self.increment_s, steps)

    def end_s(self) -> float:
        """Return the end of the last step."""
        return self.start_s + self.elapsed_s(self.steps)

    def last_step_s(self) -> float:
        """Return the duration of the last step."""
        return self.first_s + self.increment_s * (self.steps - 1)

    def cut(self, now: float) -> bool:
        """End the run with the step in flight; a step that ends now has ended. Return whether the run became
        shorter."""
        steps = self.ended(now)
        if not steps or self.start_s + self.elapsed_s(steps) < now:
            steps += 1
        if steps >= self.steps:
            return False
        self.steps = steps
        return True
