"""Figures of all runs of one experiment, averaged over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from experiments.claims.base import Figures
from experiments.claims.pascal.tails import Comparison, mean_tails
from experiments.claims.verdicts import number, numbers
from simulator.estimate import Estimate, estimate

ALPACA: Final = "alpaca_eval"
ARENA: Final = "arena_hard"
MIXED: Final = "arena_hard_mixed"
HIGH: Final = "high"
# Shares of the saturation rate, by the names of runs. The paper's figures have three rates, whose axes show
# only the order: low, medium and high. High is where NonAdaptive violates as often as in P9; the others form
# the curves.
LOADS: Final[Mapping[str, float]] = {
    "low": 0.6,
    "0.7": 0.7,
    "medium": 0.8,
    "0.9": 0.9,
    "1.0": 1.0,
    HIGH: 1.1,
    "1.2": 1.2,
    "beyond": 1.35,
}
LEVELS: Final = ("low", "medium", HIGH)
# Where blocking begins; reported with P8, but not judged.
BEYOND: Final = "beyond"


def run_name(dataset: str, arm: str, level: str, seed: int) -> str:
    """Return the name of a run, the key of its figures."""
    return f"{dataset}/{arm}/{level}/{seed}"


class Results:
    """Access the figures by dataset, scheduler and rate."""

    def __init__(self, figures: Mapping[str, Figures], seeds: Sequence[int]) -> None:
        self._figures = figures
        self._seeds = seeds

    def per_seed(self, dataset: str, arm: str, level: str, name: str) -> list[float]:
        """Return a figure for each seed."""
        runs = [self._figures[run_name(dataset, arm, level, seed)] for seed in self._seeds]
        return [number(run, name) for run in runs]

    def estimate(self, dataset: str, arm: str, level: str, name: str) -> Estimate:
        """Return a figure's mean over seeds, with its spread."""
        return estimate(self.per_seed(dataset, arm, level, name))

    def curves(self, dataset: str, arms: Sequence[str], name: str) -> dict[str, list[float]]:
        """Return the loads at which all of the schedulers ran (a quick check has not the same ones for each),
        with each one's means of a figure and their spreads."""
        levels = [
            level
            for level in LOADS
            if all(
                run_name(dataset, arm, level, seed) in self._figures for arm in arms for seed in self._seeds
            )
        ]
        lines: dict[str, list[float]] = {"loads": [LOADS[level] for level in levels]}
        for arm in arms:
            found = [self.estimate(dataset, arm, level, name) for level in levels]
            lines[f"{arm}_{name}"] = [e.mean for e in found]
            lines[f"{arm}_{name}_spread"] = [e.half_width or 0.0 for e in found]
        return lines

    def mean(self, dataset: str, arm: str, level: str, name: str) -> float:
        """Return a figure's mean over seeds."""
        return float(np.mean(self.per_seed(dataset, arm, level, name)))

    def compare(self, dataset: str, theirs: str, level: str = HIGH) -> Comparison:
        """Compare PASCAL's tails with another scheduler's."""
        return Comparison(self.tails(dataset, "pascal", level), self.tails(dataset, theirs, level))

    def change(self, dataset: str, theirs: str, start: int, level: str = HIGH) -> Estimate:
        """Return the relative change of one bin's tail, over the seeds with requests in it."""
        found = []
        for seed in self._seeds:
            ours, others = (
                self._bins(self._figures[run_name(dataset, arm, level, seed)]) for arm in ("pascal", theirs)
            )
            if start in ours and start in others:
                found.append(ours[start] / others[start] - 1.0)
        return estimate(found)

    def tails(self, dataset: str, arm: str, level: str) -> dict[int, float]:
        """Return the tail TTFT by bin, averaged over seeds."""
        return mean_tails(
            self._bins(self._figures[run_name(dataset, arm, level, seed)]) for seed in self._seeds
        )

    @staticmethod
    def _bins(run: Figures) -> dict[int, float]:
        return {int(b): t for b, t in zip(numbers(run, "bins"), numbers(run, "tails_s"), strict=True)}
