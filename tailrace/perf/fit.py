"""Fit times as sums of what work costs. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def fit_costs(work: Floats, seconds: Floats) -> Floats:
    """Return the costs c >= 0, one per column, with which work @ c is close to `seconds`, by least squares.

    `work`: shape [samples, columns]; `seconds`: positive. Errors are weighted by 1/seconds; otherwise the few
    longest times would dominate, and predictions of short ones, the majority, would be poor. A negative cost
    is noise, since no work takes negative time: it is set to 0 and the others are fitted again.
    """
    weighed = work / seconds[:, None]
    # Columns differ by ten orders of magnitude; scaling them to norm one keeps the problem well-conditioned.
    scale = np.linalg.norm(weighed, axis=0)
    columns = [column for column in range(work.shape[1]) if scale[column] > 0.0]
    costs = np.zeros(work.shape[1])
    while columns:
        solved = np.linalg.lstsq(weighed[:, columns] / scale[columns], np.ones_like(seconds), rcond=None)[0]
        worst = int(np.argmin(solved))
        if solved[worst] >= 0.0:
            costs[columns] = solved / scale[columns]
            break
        columns.pop(worst)
    return costs
