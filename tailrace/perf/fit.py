"""Fit times to features by least squares for profiling: relative errors, no negative coefficients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Fit:
    """A fit. `coefficients`: one per column; `error`: mean |predicted - measured| / measured."""

    coefficients: tuple[float, ...]
    error: float
    samples: int


def fit_times(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> Fit:
    """Find coefficients c with rows @ c close to `seconds`. `rows`: shape [samples, columns].

    Errors are weighted by 1/seconds; otherwise the few longest times would dominate. A negative coefficient
    is noise, since no work takes negative time: it is set to 0 and the others are fitted again. Raise
    ValueError for fewer samples of positive time than columns.
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
    # Columns differ by ten orders of magnitude; scaling them to norm one keeps the problem well-conditioned.
    scale = np.linalg.norm(weighed, axis=0)
    columns = [column for column in range(matrix.shape[1]) if scale[column] > 0.0]
    coefficients = np.zeros(matrix.shape[1])
    while columns:
        solved = np.linalg.lstsq(weighed[:, columns] / scale[columns], np.ones_like(times), rcond=None)[0]
        worst = int(np.argmin(solved))
        if solved[worst] >= 0.0:
            coefficients[columns] = solved / scale[columns]
            break
        columns.pop(worst)
    error = float(np.abs(weighed @ coefficients - 1.0).mean())
    return Fit(tuple(float(value) for value in coefficients), error, len(times))


def r_squared(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Return the coefficient of determination: the share of the variance that the prediction explains."""
    estimates, truth = np.array(predicted), np.array(measured)
    spread = float(((truth - truth.mean()) ** 2).sum())
    residual = float(((truth - estimates) ** 2).sum())
    return 1.0 - residual / spread if spread > 0.0 else float(residual == 0.0)
