"""The distribution of lengths of which some are censored (known only to be larger), and the calibration of
quantiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tailrace.predictor.file import Predictor
from tailrace.predictor.samples import Samples

Values = NDArray[np.float64]


class KaplanMeier:
    """The Kaplan-Meier estimate of a distribution from exact values (`ended`) and censored ones (lower
    bounds)."""

    def __init__(self, values: Values, ended: NDArray[np.bool_]) -> None:
        """Raise ValueError if no value is exact."""
        if not ended.any():
            raise ValueError("there is no exact value")
        self._at = np.unique(values[ended])
        ordered = np.sort(values)
        # All values not below it: a lower bound that equals an exact value is assumed to be larger.
        at_risk = len(values) - ordered.searchsorted(self._at, "left")
        ends = np.sort(values[ended])
        deaths = ends.searchsorted(self._at, "right") - ends.searchsorted(self._at, "left")
        self._survival = np.cumprod(1.0 - deaths / at_risk)

    def share_within(self, value: float) -> float:
        """Return the share of values that are at most `value`."""
        rank = int(self._at.searchsorted(value, "right"))
        return float(1.0 - self._survival[rank - 1]) if rank else 0.0

    def median_after(self, thresholds: Values) -> Values:
        """Return, for each of `thresholds`, the median of the values above it; the largest exact value if
        it is unknown."""
        rank = self._at.searchsorted(thresholds, "right")
        surviving = np.concatenate(([1.0], self._survival))[rank]
        # Survival decreases: search its negation, which increases.
        at = (-self._survival).searchsorted(-0.5 * surviving, "left")
        medians: Values = np.maximum(self._at[np.minimum(at, len(self._at) - 1)], thresholds)
        return medians


LEVELS: Final = (0.1, 0.25, 0.5, 0.75, 0.9)
"""Quantiles that are tested."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """The share of samples whose remaining length was within the predicted quantile `level`.

    If the quantiles are calibrated, `share` equals `level`.
    """

    level: float
    share: float


def coverage(predictor: Predictor, samples: Samples) -> list[Coverage]:
    """Return the coverage of each of LEVELS, from the rank of each sample in its predicted distribution.

    A truncated sample's rank is known to be above that of the tokens that it generated. Raise ValueError if
    all samples were truncated.
    """
    ranks = KaplanMeier(predictor.share_within(samples.hidden, samples.remaining), samples.ended)
    return [Coverage(level, ranks.share_within(level)) for level in LEVELS]
