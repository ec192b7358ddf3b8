"""The loads of CascadeInfer's serving rows, and the load at which each row is judged.

The paper gives its rates on the figures' axes only: "heavy load" is where throughput has passed its
threshold, which CascadeInfer's does at a higher rate than its baselines' (section 6.3). So the sustainable
rates are searched for, on a curve over the load. The unit is the rate at which the cluster would be full if
unequal lengths cost nothing, and a scheduler keeps up with a load if it produces `KEPT` of the tokens
demanded. Latencies are judged at `HEAVY`, the highest load of the curve with which vLLM keeps up: beyond it
requests pile up for the length of the run, and any ratio could be produced. Throughput is judged at `BEYOND`,
the highest load with which CascadeInfer keeps up. The figures include `kept_up` of each scheduler at each
load.

At `HEAVY`, vLLM's batches take two minutes to reach their final size, so runs there take five minutes, of
which the first half fills the cluster and is not counted. A scheduler that does not keep up has no steady
state to wait for: other runs take two and a half minutes, a third of them not counted. The last eighth of the
arrivals is never counted: it keeps the cluster full while the others end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from experiments.claims.base import QUICK, Effort, Figures
from experiments.claims.cascade.cluster import (
    CHAIN,
    FIGURE_2,
    FULL,
    LLUMNIX,
    MEASURED,
    MEMORY,
    ONE_STAGE,
    QUANTITY,
)
from experiments.claims.verdicts import number
from simulator.estimate import Estimate, estimate

VLLM = "round_robin"
MAIN: Final = (FULL, VLLM, LLUMNIX)

KEPT: Final = 0.95
LOADS: Final[Mapping[str, tuple[float, ...]]] = {FIGURE_2: (0.5, 0.6, 0.7), MEASURED: (0.8, 0.9)}
HEAVY: Final[Mapping[str, float]] = {FIGURE_2: 0.6, MEASURED: 0.8}
BEYOND: Final[Mapping[str, float]] = {FIGURE_2: 0.7, MEASURED: 0.9}


@dataclass(frozen=True, slots=True)
class Span:
    """Seconds of arrivals, and the share of them that is not counted."""

    seconds: float
    warm_up: float


STEADY: Final = Span(300.0, 1 / 2)
PASSING: Final = Span(150.0, 1 / 3)
_QUICK_STEADY: Final = Span(150.0, 1 / 2)
_QUICK_PASSING: Final = Span(60.0, 1 / 3)
# For the loads that are judged; for the rest of the curve, and with measured kernels, only the first.
SEEDS: Final = (1, 2, 3)


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """One run: a scheduler, the cost of unequal lengths, a load and a seed."""

    policy: str
    penalty: str
    load: float
    seed: int

    @property
    def name(self) -> str:
        """Return the name of the run."""
        return f"cascade-heavy/{self.policy}/{self.penalty}/{self.load:g}/{self.seed}"


def loads_of(effort: Effort, penalty: str) -> tuple[float, ...]:
    """Return the loads of the curve; in a quick check only those that are judged."""
    return (HEAVY[penalty], BEYOND[penalty]) if effort is QUICK else LOADS[penalty]


def span_of(effort: Effort, penalty: str, load: float) -> Span:
    """Return the length of a run."""
    steady = penalty == FIGURE_2 and load == HEAVY[penalty]
    if effort is QUICK:
        return _QUICK_STEADY if steady else _QUICK_PASSING
    return STEADY if steady else PASSING


def seeds_of(effort: Effort, policy: str, penalty: str, load: float) -> tuple[int, ...]:
    """Return the seeds of a scheduler's runs at a load.

    Other layouts have one, because they take minutes to simulate if they do not keep up.
    """
    judged = policy in MAIN and penalty == FIGURE_2 and load in (HEAVY[penalty], BEYOND[penalty])
    return SEEDS if judged and effort is not QUICK else SEEDS[:1]


def cells(effort: Effort) -> Sequence[Cell]:
    """Return all runs; a quick check has none with measured kernels."""
    penalties = (FIGURE_2,) if effort is QUICK else (FIGURE_2, MEASURED)
    found = [
        Cell(policy, penalty, load, seed)
        for penalty in penalties
        for load in loads_of(effort, penalty)
        for policy in MAIN
        for seed in seeds_of(effort, policy, penalty, load)
    ]
    layouts = {HEAVY[FIGURE_2]: (CHAIN, ONE_STAGE, QUANTITY, MEMORY), BEYOND[FIGURE_2]: (CHAIN, MEMORY)}
    found += [
        Cell(policy, FIGURE_2, load, seed)
        for load, policies in layouts.items()
        for policy in policies
        for seed in seeds_of(effort, policy, FIGURE_2, load)
    ]
    return found


class Results:
    """Access the figures of all runs by scheduler, penalty and load."""

    def __init__(self, figures: Mapping[str, Figures], effort: Effort) -> None:
        self._figures = figures
        self._effort = effort

    def has(self, policy: str, penalty: str, load: float) -> bool:
        """Return whether a scheduler ran at a load."""
        return Cell(policy, penalty, load, SEEDS[0]).name in self._figures

    def curve(self, policy: str, penalty: str) -> tuple[float, ...]:
        """Return the loads at which a scheduler ran."""
        return tuple(load for load in LOADS[penalty] if self.has(policy, penalty, load))

    def per_seed(self, policy: str, penalty: str, load: float, name: str) -> list[float]:
        """Return a figure for each seed."""
        seeds = seeds_of(self._effort, policy, penalty, load)
        return [number(self._figures[Cell(policy, penalty, load, seed).name], name) for seed in seeds]

    def estimate(self, policy: str, penalty: str, load: float, name: str) -> Estimate:
        """Return a figure's mean over seeds, with its spread."""
        return estimate(self.per_seed(policy, penalty, load, name))

    def change(self, baseline: str, penalty: str, load: float, name: str, least: float = 0.0) -> Estimate:
        """Return ours over the baseline's on the same requests, less 1; the baseline's counts as at least
        `least`.

        Uses the seeds that both ran on: the seeds of one are the first of the other's.
        """
        ours, theirs = (self.per_seed(policy, penalty, load, name) for policy in (FULL, baseline))
        return estimate([a / max(b, least) - 1.0 for a, b in zip(ours, theirs, strict=False)])

    def requests(self, policy: str, penalty: str, load: float) -> float:
        """Return the mean number of requests that a run measured."""
        return self.estimate(policy, penalty, load, "measured").mean
