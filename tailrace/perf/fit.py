"""Least squares of times over features, as profiling needs it: relative errors, no negative coefficient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Fit:
    """`coefficients`: one a column. `error`: mean of |predicted - measured| / measured."""

    coefficients: tuple[float, ...]
    error: float
    samples: int


def fit_times(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> Fit:
    """Coefficients c with rows @ c near `seconds`. `rows`: shape [samples, columns].

    Errors are weighed by 1/seconds, or the few longest times would decide alone. A coefficient that comes out
    negative is noise, for no work takes less than no time: it is set to 0 and the others are fitted again.
    Raises ValueError without a sample of positive time for each column.
    """
    matrix, times = np.array(rows, dtype=np.float64), np.array(seconds, dtype=np.float64)
    if not len(times):
        raise ValueError("there are no samples")
    if matrix.ndim != 2 or len(matrix) != len(times):
        raise ValueError(f"{len(times)} times do not go with rows of shape {matrix.shape}")
    matrix, times = matrix[times > 0.0], times[times > 0.0]
    if len(times) < matrix.shape[1]:
        raise ValueError(f"{len(times)} samples are too few for {matrix.shape[1]} coefficients")
    weighed = matrix / times[:, None]
    # Columns differ by ten orders of magnitude; scaled to one, the normal equations stay solvable.
    scale = np.linalg.norm(weighed, axis=0)
    kept = [column for column in range(matrix.shape[1]) if scale[column] > 0.0]
    found = np.zeros(matrix.shape[1])
    while kept:
        solved = np.linalg.lstsq(weighed[:, kept] / scale[kept], np.ones_like(times), rcond=None)[0]
        worst = int(np.argmin(solved))
        if solved[worst] >= 0.0:
            found[kept] = solved / scale[kept]
            break
        kept.pop(worst)
    error = float(np.abs(weighed @ found - 1.0).mean())
    return Fit(tuple(float(value) for value in found), error, len(times))


def r_squared(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Share of the variance of what was measured that the prediction explains; 1: all of it."""
    found, truth = np.array(predicted), np.array(measured)
    spread = float(((truth - truth.mean()) ** 2).sum())
    left = float(((truth - found) ** 2).sum())
    return 1.0 - left / spread if spread > 0.0 else float(left == 0.0)
