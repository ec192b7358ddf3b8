"""Figures of a run as what they are: a number or a list; and as text, with their spread over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from simulator.claims.base import Figures
from simulator.estimate import Estimate


def number(figures: Figures, name: str) -> float:
    """A figure that is a number."""
    value = figures[name]
    if not isinstance(value, (int, float)):
        raise TypeError(f"{name} is not a number")
    return float(value)


def numbers(figures: Figures, name: str) -> Sequence[float]:
    """A figure that is a list."""
    value = figures[name]
    if isinstance(value, (int, float)):
        raise TypeError(f"{name} is not a list")
    return value


def format_estimate(found: Estimate, form: str) -> str:
    """Format a mean and its spread, as "12% ± 3%"; `form` is a format specification. One seed has no "
    "spread."""
    mean = format(found.mean, form)
    return mean if found.half_width is None else f"{mean} ± {format(found.half_width, form.lstrip('+'))}"


def spreads_of(estimates: Mapping[str, Estimate]) -> dict[str, float]:
    """Return the half-widths of those that have one."""
    return {name: e.half_width for name, e in estimates.items() if e.half_width is not None}


def means_of(estimates: Mapping[str, Estimate]) -> dict[str, float]:
    """Return the means."""
    return {name: e.mean for name, e in estimates.items()}
