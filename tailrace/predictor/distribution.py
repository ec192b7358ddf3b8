"""How lengths are distributed of which some are only known to be larger, and how far quantiles hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tailrace.predictor.file import Predictor
from tailrace.predictor.samples import Samples

Values = NDArray[np.float64]


class KaplanMeier:
    """The Kaplan-Meier estimate: how values are distributed of which some are only known to be larger.

    Each is exact (`ended`) or a lower bound.
    """

    def __init__(self, values: Values, ended: NDArray[np.bool_]) -> None:
        """Raises ValueError for no exact value."""
        if not ended.any():
            raise ValueError("no exact value among them")
        self._at = np.unique(values[ended])
        ordered = np.sort(values)
        # Those not smaller: a lower bound that equals an exact value is taken to be longer.
        at_risk = len(values) - ordered.searchsorted(self._at, "left")
        ends = np.sort(values[ended])
        deaths = ends.searchsorted(self._at, "right") - ends.searchsorted(self._at, "left")
        self._survival = np.cumprod(1.0 - deaths / at_risk)

    def share_within(self, value: float) -> float:
        """The share of values that are no larger."""
        found = int(self._at.searchsorted(value, "right"))
        return float(1.0 - self._survival[found - 1]) if found else 0.0

    def median_after(self, given: Values) -> Values:
        """Of the values above each of `given`, the median; the largest exact one where that is not known."""
        found = self._at.searchsorted(given, "right")
        left = np.concatenate(([1.0], self._survival))[found]
        # Survival falls: search in its mirror image.
        at = (-self._survival).searchsorted(-0.5 * left, "left")
        medians: Values = np.maximum(self._at[np.minimum(at, len(self._at) - 1)], given)
        return medians


LEVELS: Final = (0.1, 0.25, 0.5, 0.75, 0.9)
"""Quantiles that are tested."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """How many of the samples had no more to come than the quantile `level` said: `level` of them, if the
    quantiles are right."""

    level: float
    share: float


def coverage(predictor: Predictor, samples: Samples) -> list[Coverage]:
    """By the rank of each sample in what was predicted for it; that of one that was cut off is known to be
    above the rank of what came. Raises ValueError when all were cut off."""
    ranks = KaplanMeier(predictor.share_within(samples.hidden, samples.remaining), samples.ended)
    return [Coverage(level, ranks.share_within(level)) for level in LEVELS]
