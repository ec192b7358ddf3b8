"""Means over seeds with confidence intervals, and the best of several."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

# 0.975 quantiles of Student's t by degrees of freedom, from 1; beyond, the normal quantile is close enough.
_T: Final = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
_NORMAL: Final = 1.960


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and half the width of its 95% confidence interval (Student's t); None for a single value."""

    mean: float
    half_width: float | None


def t_quantile(degrees: int) -> float:
    """Return the 0.975 quantile of Student's t. Raise ValueError for less than one degree of freedom."""
    if degrees < 1:
        raise ValueError("an interval needs at least two values")
    return _T[degrees - 1] if degrees <= len(_T) else _NORMAL


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean and interval of one value per seed. Raise ValueError if there are none."""
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
    """The best by its mean, and all that cannot be distinguished from it."""

    name: str
    # Those whose difference from the best, paired by seed, has a 95% interval that contains 0; for a single
    # seed, those equal to the best.
    tied: frozenset[str]


def best_of(values: Mapping[str, Sequence[float]], sign: int) -> Best | None:
    """Return the best of several, each with one value per seed in the same order.

    `sign` is 1 if more is better, -1 if less is. Candidates with a value that is not finite are left out;
    return None if that leaves none.
    """
    usable = {
        name: [sign * value for value in column]
        for name, column in values.items()
        if column and all(math.isfinite(value) for value in column)
    }
    if not usable:
        return None
    winner = max(usable, key=lambda name: math.fsum(usable[name]) / len(usable[name]))
    tied = (name for name in usable if name != winner and _indistinguishable(usable[winner], usable[name]))
    return Best(winner, frozenset(tied))


def _indistinguishable(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    gap = estimate([own - other for own, other in zip(ours, theirs, strict=True)])
    return gap.mean <= (gap.half_width or 0.0)
