"""Map values to positions on an axis, and choose round numbers for ticks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_ROUND: Final = (1.0, 2.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class Scale:
    """An axis from `low` to `high` over pixels `start` to `end`. For logarithmic axes, `low` is above 0."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def place(self, value: float) -> float:
        """Return the position of a value in pixels; values outside are clamped."""
        value = min(max(value, self.low), self.high)
        low, high = self.low, self.high
        if self.logarithmic:
            value, low, high = math.log(value), math.log(low), math.log(high)
        return self.start + (self.end - self.start) * (value - low) / (high - low)

    def ticks(self, about: int = 6) -> list[float]:
        """Return about `about` round values within the axis."""
        return (
            _log_ticks(self.low, self.high, about) if self.logarithmic else _ticks(self.low, self.high, about)
        )


def linear(values: Sequence[float], start: float, end: float) -> Scale:
    """Return a scale from 0 to a round number above all values."""
    high = max(values, default=0.0)
    if not high > 0.0:
        high = 1.0
    step = _step(high / 5)
    return Scale(0.0, math.ceil(high / step - 1e-9) * step, start, end)


def logarithmic(values: Sequence[float], start: float, end: float) -> Scale:
    """Return a scale around all positive values, rounded to 1, 2 or 5 of a decade; without any, from 1 to
    10."""
    positive = [value for value in values if value > 0.0]
    if not positive:
        return Scale(1.0, 10.0, start, end, True)
    low, high = _round_down(min(positive)), _round_up(max(positive))
    return Scale(low, high if high > low else 10.0 * low, start, end, True)


def within(low: float, high: float, start: float, end: float) -> Scale:
    """Return a scale from exactly `low` to `high`, slightly extended if they are equal."""
    return Scale(low, high if high > low else low + 1.0, start, end)


def tick_text(value: float) -> str:
    """Format 1200 as 1,200, 20000 as 20k, 0.25 as 0.25."""
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    if abs(value) >= 1e4:
        return f"{value / 1e3:g}k"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"


def _step(least: float) -> float:
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in _ROUND if factor * power >= least * (1 - 1e-9))


def _ticks(low: float, high: float, about: int) -> list[float]:
    step = _step((high - low) / about)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def _log_ticks(low: float, high: float, about: int) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1.0, 2.0, 5.0), (1.0, 3.0), (1.0,)):
        ticks = [
            digit * 10.0**decade
            for decade in decades
            for digit in digits
            if low * (1 - 1e-9) <= digit * 10.0**decade <= high * (1 + 1e-9)
        ]
        if len(ticks) <= about + 2:
            return ticks
    return ticks[:: -(-len(ticks) // about)]


def _round_down(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    return max(digit * power for digit in (1.0, 2.0, 5.0) if digit * power <= value * (1 + 1e-9))


def _round_up(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    return min(digit * power for digit in (1.0, 2.0, 5.0, 10.0) if digit * power >= value * (1 - 1e-9))
