"""Numbers from the command line: finite, within a range that the program can carry out, and never echoed at
length."""

from __future__ import annotations

import math
from typing import Any, Final

import click

from tailrace.bounded import shown
from tailrace.durations import UNITS, in_seconds

# Seconds, rates, factors: whatever it counts, more is a slip of the pen.
_REAL_MAX: Final = 1e12
# Exact as a float, too; larger than any number of bytes or tokens here.
_WHOLE_MAX: Final = 2**53


class RealRange(click.FloatRange):
    """A finite number within bounds; without `max`, up to 1e12."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number. Raise click.BadParameter."""
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            self.fail(f"{shown(value)} is not a finite number", param, ctx)
        if abs(number) > _REAL_MAX:
            self.fail(f"{shown(value)} is out of range", param, ctx)
        converted: float = super().convert(number, param, ctx)
        return converted


class Duration(RealRange):
    """A number of seconds within bounds, or one with another unit: 500ms, 2m, 1h, 7d."""

    name = "duration"

    def __init__(
        self,
        min: float | None = None,
        max: float | None = None,
        min_open: bool = False,
        or_zero: bool = False,
    ) -> None:
        """`or_zero`: 0 is allowed below `min`, too, and disables something."""
        super().__init__(min, max, min_open)
        self._or_zero = or_zero

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the seconds. Raise click.BadParameter."""
        seconds = in_seconds(value) if isinstance(value, str) else value
        try:
            number = float(seconds)
        except (ValueError, OverflowError):
            self.fail(f"{shown(value)} is not a duration: seconds, or a number with {UNITS}", param, ctx)
        return 0.0 if self._or_zero and number == 0.0 else super().convert(seconds, param, ctx)

    def _describe_range(self) -> str:
        return f"0 or {super()._describe_range()}" if self._or_zero else super()._describe_range()


class WholeRange(click.IntRange):
    """A whole number within bounds; without `max`, up to 2**53."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number. Raise click.BadParameter."""
        try:
            number = int(value)
        except (ValueError, OverflowError):
            self.fail(f"{shown(value)} is not a whole number", param, ctx)
        if abs(number) > _WHOLE_MAX:
            self.fail(f"{shown(value)} is out of range", param, ctx)
        converted: int = super().convert(number, param, ctx)
        return converted
