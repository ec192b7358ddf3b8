"""Figures of all runs of one experiment, averaged over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from simulator.claims.base import Figures
from simulator.claims.figures import number, numbers
from simulator.claims.pascal.tails import Comparison, mean_tails

ALPACA: Final = "alpaca_eval"
ARENA: Final = "arena_hard"
MIXED: Final = "arena_hard_mixed"
HIGH: Final = "high"
# Fractions of the saturation rate.
LOADS: Final[Mapping[str, float]] = {"low": 0.8, "medium": 1.0, HIGH: 1.2}
# Where blocking begins; reported with P8, judged by nothing.
BEYOND: Final = "beyond"
BEYOND_LOAD: Final = 1.35


def run_name(dataset: str, arm: str, level: str, seed: int) -> str:
    """The name of a run, by which its figures are found."""
    return f"{dataset}/{arm}/{level}/{seed}"


class Results:
    """By dataset, scheduler and rate."""

    def __init__(self, figures: Mapping[str, Figures], seeds: Sequence[int]) -> None:
        self._figures = figures
        self._seeds = seeds

    def each(self, dataset: str, arm: str, level: str, name: str) -> list[float]:
        """A figure of each seed."""
        runs = [self._figures[run_name(dataset, arm, level, seed)] for seed in self._seeds]
        return [number(run, name) for run in runs]

    def mean(self, dataset: str, arm: str, level: str, name: str) -> float:
        """A figure's mean over seeds."""
        return float(np.mean(self.each(dataset, arm, level, name)))

    def tails(self, dataset: str, arm: str, level: str) -> dict[int, float]:
        """Tail TTFT by bin, averaged over seeds."""
        runs = [self._figures[run_name(dataset, arm, level, seed)] for seed in self._seeds]
        return mean_tails(
            {int(b): t for b, t in zip(numbers(run, "bins"), numbers(run, "tails_s"), strict=True)}
            for run in runs
        )

    def compare(self, dataset: str, theirs: str, level: str = HIGH) -> Comparison:
        """PASCAL's tails against another scheduler's."""
        return Comparison(self.tails(dataset, "pascal", level), self.tails(dataset, theirs, level))
