"""Click types for durations."""

from __future__ import annotations

import math

import click


class ZeroOrSeconds(click.ParamType[float]):
    """Parse 0, which disables something, or at least `min_s` seconds."""

    name = "seconds"

    def __init__(self, min_s: float) -> None:
        self._min_s = min_s

    def convert(self, value: str | float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the seconds. Raise click.BadParameter."""
        try:
            seconds = float(value)
        except ValueError:
            seconds = math.nan
        if not math.isfinite(seconds) or (seconds != 0 and seconds < self._min_s):
            self.fail(f"{value!r}: 0 or at least {self._min_s:g} seconds expected", param, ctx)
        return seconds


KEPT_ANSWERS = ZeroOrSeconds(min_s=5.0)
"""Retention of answers: they expire in steps of 0.5 s, and clients take a while to come back."""
