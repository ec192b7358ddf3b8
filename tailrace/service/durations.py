"""Durations on the command line."""

from __future__ import annotations

import math

import click


class OffOrSeconds(click.ParamType[float]):
    """0, which turns something off, or at least `least_s` seconds."""

    name = "seconds"

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s

    def convert(self, value: str | float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the seconds. Raises click.BadParameter."""
        try:
            seconds = float(value)
        except ValueError:
            seconds = math.nan
        if not math.isfinite(seconds) or (seconds != 0 and seconds < self._least_s):
            self.fail(f"{value!r}: 0 or at least {self._least_s:g} seconds expected", param, ctx)
        return seconds


KEPT_ANSWERS = OffOrSeconds(least_s=5.0)
"""How long answers are kept: they expire in steps of 0.5 s, and a client takes a while to come back."""
