"""What an engine's steps have taken lately, and how long a step may take at most by that."""

from __future__ import annotations

from typing import Final

# Steps of at least so many tokens compute prompts; below, a step's time hardly depends on them.
LARGE_TOKENS: Final = 128
# Steps of a kind that must have been seen before they tell anything: the first ones compile.
SMALL_STEPS_MIN: Final = 32
LARGE_STEPS_MIN: Final = 4
# The longest step counts for at least so many steps of its kind, and for at most twice as many.
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
    """Written by the engine's thread, read by any."""

    def __init__(self) -> None:
        # Seconds a step, and seconds a token.
        self._small = _RecentMax()
        self._large = _RecentMax()

    def add(self, seconds: float, tokens: int) -> None:
        """A step that computed so many tokens took so long. Steps that computed none are not counted."""
        if tokens >= LARGE_TOKENS:
            self._large.add(seconds / tokens)
        elif tokens > 0:
            self._small.add(seconds)

    def expected_s(self, tokens: int) -> float | None:
        """The longest that a step of up to so many tokens took lately, scaled to as many; None: too few
        steps of that kind were seen to tell."""
        if self._small.count < SMALL_STEPS_MIN:
            return None
        if tokens < LARGE_TOKENS:
            return self._small.value
        if self._large.count < LARGE_STEPS_MIN:
            return None
        return max(self._small.value, self._large.value * tokens)
