"""Tail TTFT by reasoning length, by the rule of figure 10."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

BIN_TOKENS: Final = 256
# Requests below which another percentile is taken: fewer than 5 are left out.
_RULE: Final = ((5, None), (10, 100.0), (20, 90.0), (100, 95.0))


def percentile_for(count: int) -> float | None:
    """The percentile that stands for the tail of `count` requests; None: too few."""
    for below, percentile in _RULE:
        if count < below:
            return percentile
    return 99.0


def tail_by_bin(reasoning: NDArray[np.int64], ttft_s: NDArray[np.float64]) -> dict[int, float]:
    """Tail TTFT in seconds by the first reasoning length of each bin."""
    bins = reasoning // BIN_TOKENS
    tails: dict[int, float] = {}
    for index in np.unique(bins).tolist():
        inside = ttft_s[bins == index]
        percentile = percentile_for(len(inside))
        if percentile is not None:
            tails[index * BIN_TOKENS] = float(np.percentile(inside, percentile))
    return tails


def mean_tails(runs: Iterable[Mapping[int, float]]) -> dict[int, float]:
    """Each bin's tail, averaged over runs; bins that a run does not have are left out."""
    runs = list(runs)
    common = set.intersection(*(set(run) for run in runs)) if runs else set()
    return {start: float(np.mean([run[start] for run in runs])) for start in sorted(common)}


class Comparison:
    """Tails of one scheduler against another's, bin by bin."""

    def __init__(self, ours: Mapping[int, float], theirs: Mapping[int, float]) -> None:
        self.starts: Sequence[int] = [start for start in ours if start in theirs]
        if not self.starts:
            raise ValueError("two runs without a common bin cannot be compared")
        self._ours = ours
        self._theirs = theirs

    def change(self, start: int) -> float:
        """Relative change of the bin's tail; negative: ours is shorter."""
        return self._ours[start] / self._theirs[start] - 1.0

    def change_s(self, start: int) -> float:
        """The same in seconds."""
        return self._ours[start] - self._theirs[start]

    def best(self) -> int:
        """Bin with the largest relative gain."""
        return min(self.starts, key=self.change)

    def worst(self) -> int:
        """Bin with the largest relative loss."""
        return max(self.starts, key=self.change)
