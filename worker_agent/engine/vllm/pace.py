"""Time between a request's tokens, and between all requests' tokens lately."""

from __future__ import annotations

from collections import deque

import numpy as np

_SMOOTHING = 0.1
_WINDOW_S = 2.0
_WINDOW_SAMPLES = 16384


class Pace:
    """One request: exponential moving average of its token interval."""

    __slots__ = ("_last_s", "interval_ms")

    def __init__(self, interval_ms: float = 0.0) -> None:
        """`interval_ms` as measured where the request came from; 0: unknown."""
        self.interval_ms = interval_ms
        self._last_s = 0.0

    def token(self, now_s: float) -> float:
        """A token came now (monotonic clock); milliseconds since the one before, 0 for the first here."""
        last_s, self._last_s = self._last_s, now_s
        if last_s == 0.0:
            return 0.0
        interval_ms = (now_s - last_s) * 1000
        if self.interval_ms == 0.0:
            self.interval_ms = interval_ms
        else:
            self.interval_ms += _SMOOTHING * (interval_ms - self.interval_ms)
        return interval_ms


class RecentIntervals:
    """Token intervals of the last two seconds, at most 16,384 of them. Written by one thread."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=_WINDOW_SAMPLES)

    def add(self, now_s: float, interval_ms: float) -> None:
        """One more interval, ended now."""
        self._samples.append((now_s, interval_ms))

    def mean_and_p99_ms(self, now_s: float) -> tuple[float, float]:
        """Over the window; zeros when it is empty."""
        recent = [interval for at, interval in list(self._samples) if at >= now_s - _WINDOW_S]
        if not recent:
            return 0.0, 0.0
        values = np.asarray(recent)
        return float(values.mean()), float(np.percentile(values, 99))
