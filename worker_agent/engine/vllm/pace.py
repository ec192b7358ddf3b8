"""Time between a request's tokens."""

from __future__ import annotations

_SMOOTHING = 0.1


class Pace:
    """One request's token interval, an exponential moving average."""

    __slots__ = ("_last_s", "interval_ms")

    def __init__(self, interval_ms: float = 0.0) -> None:
        """`interval_ms` is the source's measurement for an imported request; 0: unknown."""
        self.interval_ms = interval_ms
        self._last_s = 0.0

    def token(self, now_s: float) -> float:
        """Record a token at `now_s` (monotonic) and return the milliseconds since the last one; 0 for the
        first one here."""
        last_s, self._last_s = self._last_s, now_s
        if last_s == 0.0:
            return 0.0
        interval_ms = (now_s - last_s) * 1000
        if self.interval_ms == 0.0:
            self.interval_ms = interval_ms
        else:
            self.interval_ms += _SMOOTHING * (interval_ms - self.interval_ms)
        return interval_ms
