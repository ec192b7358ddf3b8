"""Tails of TTFT by reasoning length (simulator/goodput.py): averages over runs, and comparisons of
schedulers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np


def mean_tails(runs: Iterable[Mapping[int, float]]) -> dict[int, float]:
    """Average each bin's tail over runs; bins that some run does not have are left out."""
    runs = list(runs)
    common = set.intersection(*(set(run) for run in runs)) if runs else set()
    return {start: float(np.mean([run[start] for run in runs])) for start in sorted(common)}


class Comparison:
    """Compare the tails of one scheduler with another's, bin by bin."""

    def __init__(self, ours: Mapping[int, float], theirs: Mapping[int, float]) -> None:
        self.starts: Sequence[int] = [start for start in ours if start in theirs]
        if not self.starts:
            raise ValueError("two runs without a common bin cannot be compared")
        self._ours = ours
        self._theirs = theirs

    def change(self, start: int) -> float:
        """Return the relative change of the bin's tail; negative: ours is shorter."""
        return self._ours[start] / self._theirs[start] - 1.0

    def change_s(self, start: int) -> float:
        """Return the change in seconds."""
        return self._ours[start] - self._theirs[start]

    def best(self) -> int:
        """Return the bin with the largest relative gain."""
        return min(self.starts, key=self.change)

    def worst(self) -> int:
        """Return the bin with the largest relative loss."""
        return max(self.starts, key=self.change)
