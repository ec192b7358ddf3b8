"""How values are distributed of which some are only known to be larger (the Kaplan-Meier estimate)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]


class KaplanMeier:
    """Of values, and whether each is exact (`ended`) or a lower bound."""

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
