"""A distribution given by some of its quantiles."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class QuantileTable:
    """Quantiles `values` at `shares`; between two of them the logarithm of the value is linear.

    For lengths, which span orders of magnitude, that is the least surprising interpolation. Values may have
    any unit and must be above zero.
    """

    shares: tuple[float, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        """Raise ValueError unless shares rise from 0 to 1 and values are positive and do not fall."""
        if len(self.shares) != len(self.values) or len(self.shares) < 2:
            raise ValueError("a quantile table needs one value for each of at least two shares")
        if self.shares[0] != 0.0 or self.shares[-1] != 1.0 or not np.all(np.diff(self.shares) > 0):
            raise ValueError(f"shares must rise from 0 to 1: {self.shares}")
        if not self.values[0] > 0.0 or not np.all(np.diff(self.values) >= 0):
            raise ValueError(f"values must be above zero and must not fall: {self.values}")

    def at(self, shares: Floats) -> Floats:
        """Return the quantiles at `shares`, each in [0, 1]."""
        quantiles: Floats = np.exp(np.interp(shares, self.shares, np.log(self.values)))
        return quantiles

    def sample(self, count: int, rng: np.random.Generator) -> Floats:
        """Draw `count` independent values."""
        return self.at(rng.random(count))

    def moment(self, power: int) -> float:
        """Return the exact mean of value ** power."""
        total = 0.0
        for index in range(len(self.shares) - 1):
            low, high = self.values[index] ** power, self.values[index + 1] ** power
            mean = low if high == low else (high - low) / math.log(high / low)
            total += mean * (self.shares[index + 1] - self.shares[index])
        return total

    def mean(self) -> float:
        """Return the mean."""
        return self.moment(1)

    def deviation(self) -> float:
        """Return the standard deviation."""
        return math.sqrt(self.moment(2) - self.moment(1) ** 2)
