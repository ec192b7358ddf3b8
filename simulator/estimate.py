"""Means over seeds with confidence intervals, and which of several is the best."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

# Quantiles 0.975 of Student's t by degrees of freedom, from 1; beyond, the normal's is within a hundredth of
# what they are multiplied with.
_T: Final = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
_NORMAL: Final = 1.960


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean, and half the width of its 95% confidence interval (Student's t); None: of a single value."""

    mean: float
    half_width: float | None


def t_quantile(degrees: int) -> float:
    """Student's t at 0.975. Raises ValueError below one degree of freedom."""
    if degrees < 1:
        raise ValueError("an interval needs at least two values")
    return _T[degrees - 1] if degrees <= len(_T) else _NORMAL


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and interval of one value a seed. Raises ValueError for no values."""
    if not values:
        raise ValueError("no values to take a mean of")
    count = len(values)
    mean = math.fsum(values) / count
    if count == 1:
        return Estimate(mean, None)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return Estimate(mean, t_quantile(count - 1) * math.sqrt(variance / count))


@dataclass(frozen=True, slots=True)
class Best:
    """The best by its mean, and all that cannot be told from it."""

    name: str
    # Their difference from the best, seed by seed, has a 95% interval that contains 0; of a single seed,
    # those that are equal to it.
    tied: frozenset[str]


def best_of(values: Mapping[str, Sequence[float]], sign: int) -> Best | None:
    """The best of several, each with one value a seed, the same seeds in the same order.

    `sign` 1: more is better, -1: less. Those with a value that is not a number are left out; None: all are.
    """
    usable = {
        name: [sign * value for value in column]
        for name, column in values.items()
        if column and all(math.isfinite(value) for value in column)
    }
    if not usable:
        return None
    winner = max(usable, key=lambda name: math.fsum(usable[name]) / len(usable[name]))
    tied = (name for name in usable if name != winner and _level(usable[winner], usable[name]))
    return Best(winner, frozenset(tied))


def _level(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    gap = estimate([mine - other for mine, other in zip(ours, theirs, strict=True)])
    return gap.mean <= (gap.half_width or 0.0)
