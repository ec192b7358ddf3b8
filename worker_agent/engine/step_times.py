"""Recent durations of an engine's steps, and an upper bound for a step derived from them."""

from __future__ import annotations

from typing import Final

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


class StepTimes:
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
