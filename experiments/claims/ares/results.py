"""Figures of all runs of ARES's serving experiment, by dataset, scheduler, rate and seed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from experiments.claims.base import Figures
from experiments.claims.verdicts import number
from simulator.estimate import Estimate, estimate


def run_name(dataset: str, arm: str, level: str, seed: int) -> str:
    """Return the name of a run, the key of its figures."""
    return f"{dataset}/{arm}/{level}/{seed}"


def load_level(load: float) -> str:
    """Return the name of a share of the saturation rate."""
    return f"load{load:g}"


def rate_level(rate_per_s: float) -> str:
    """Return the name of a rate on the paper's axis."""
    return f"rps{rate_per_s:g}"


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean of positive values."""
    return math.exp(math.fsum(math.log(value) for value in values) / len(values))


@dataclass(frozen=True, slots=True)
class Matched:
    """The load at which a curve reaches a value."""

    load: float
    # Whether the curve reaches it; if not, `load` is its nearer end.
    reached: bool


class Results:
    """Access the figures of `seeds`, on the curve of `loads`."""

    def __init__(self, figures: Mapping[str, Figures], loads: Sequence[float], seeds: Sequence[int]) -> None:
        self.loads = loads
        self._figures = figures
        self._seeds = seeds

    def per_seed(self, dataset: str, arm: str, level: str, name: str) -> list[float]:
        """Return a figure for each seed."""
        return [number(self._figures[run_name(dataset, arm, level, seed)], name) for seed in self._seeds]

    def estimate(self, dataset: str, arm: str, level: str, name: str) -> Estimate:
        """Return a figure's mean over seeds, with its spread."""
        return estimate(self.per_seed(dataset, arm, level, name))

    def ratio(self, dataset: str, arms: tuple[str, str], level: str, name: str) -> Estimate:
        """Return the ratio of a figure between two schedulers on the same requests."""
        first, second = (self.per_seed(dataset, arm, level, name) for arm in arms)
        return estimate([ours / theirs for ours, theirs in zip(first, second, strict=True)])

    def curve(self, dataset: str, arm: str, name: str) -> dict[str, list[float]]:
        """Return a positive figure's geometric means over the loads, which limit the influence of one
        seed."""
        means = [geometric_mean(self.per_seed(dataset, arm, load_level(load), name)) for load in self.loads]
        return {"loads": list(self.loads), f"{arm}_{name}": means}

    def match(self, dataset: str, arm: str, name: str, wanted: float) -> Matched:
        """Return the load at which the scheduler's geometric mean of a rising figure is `wanted`."""
        means = self.curve(dataset, arm, name)[f"{arm}_{name}"]
        if means[0] >= wanted:
            return Matched(self.loads[0], means[0] == wanted)
        for (low, below), (high, above) in pairwise(zip(self.loads, means, strict=True)):
            if below < wanted <= above:
                share = math.log(wanted / below) / math.log(above / below)
                return Matched(low + share * (high - low), True)
        return Matched(self.loads[-1], False)

    def at_load(self, dataset: str, arm: str, load: float, name: str) -> list[float]:
        """Return a positive figure of each seed between two loads of the curve, interpolated in its
        logarithm."""
        lines = [self.per_seed(dataset, arm, load_level(at), name) for at in self.loads]
        rows = np.log(np.array(lines)).T
        return [math.exp(float(np.interp(load, self.loads, row))) for row in rows]

    def change_at_load(self, dataset: str, arms: tuple[str, str], load: float, name: str) -> Estimate:
        """Return the relative change of a figure from the second scheduler to the first, on the same
        requests.

        Mean and spread are computed from the ratio's logarithm, which limits the influence of one seed.
        """
        first, second = (self.at_load(dataset, arm, load, name) for arm in arms)
        logs = estimate([math.log(ours / theirs) for ours, theirs in zip(first, second, strict=True)])
        mean = math.exp(logs.mean)
        half = None if logs.half_width is None else mean * math.sinh(logs.half_width)
        return Estimate(mean - 1.0, half)
