"""Figures of a run as what they are: a number or a list."""

from __future__ import annotations

from collections.abc import Sequence

from simulator.claims.base import Figures


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
