"""Compare one slice under one policy, live and simulated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final

import numpy as np

from experiments.live.simulated.figures import Spread
from experiments.live.simulated.outcome import Outcome
from experiments.live.simulated.replay import LiveRun
from experiments.live.simulated.simulation import simulate_slice
from experiments.live.simulated.slices import Slice

# Simulations differ by when the workers' reports are due.
SEEDS: Final = 12
# Allowed relative difference of live and simulated latencies.
TOLERANCE: Final = 0.15
_FIGURES: Final = ("ttft", "tpot", "latency")


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison. Ratios are live / simulated, where simulated is the mean over the seeds."""

    trace: str
    policy: str
    # Of the engines, relative to their profile.
    speed: float
    live: LiveRun
    simulated: Sequence[Outcome]
    ratios: Mapping[str, Spread]
    # Minimum and maximum over the simulator's seeds, relative to their mean.
    simulated_range: Mapping[str, tuple[Spread, Spread]]
    # Share of requests placed on the same instance: live and simulated; two seeds of the simulator.
    same_instance: float
    same_instance_simulated: float
    # Share of requests that would have to move for equal numbers on each instance; the same two.
    moved_share: float
    moved_share_simulated: float

    @property
    def within(self) -> bool | None:
        """Whether every latency is within the tolerance; None if the machine did not keep up."""
        if not self.live.machine.kept_up:
            return None
        return all(abs(ratio - 1.0) <= TOLERANCE for ratio, _, _ in self._figures())

    @property
    def within_range(self) -> bool | None:
        """Whether every latency is within the tolerance of some seed; None if the machine did not keep up."""
        if not self.live.machine.kept_up:
            return None
        low, high = 1.0 - TOLERANCE, 1.0 + TOLERANCE
        return all(low * least <= ratio <= high * most for ratio, least, most in self._figures())

    def _figures(self) -> Iterator[tuple[float, float, float]]:
        """Yield each ratio with the minimum and maximum over the simulator's seeds, relative to their
        mean."""
        for name, ratio in self.ratios.items():
            least, most = self.simulated_range[name]
            for each in zip(ratio, least, most, strict=True):
                # NaN: there were no values to compare.
                if not np.isnan(each[0]):
                    yield each

    def as_dict(self) -> dict[str, object]:
        """Return the row for JSON, without the placement of each request."""
        row = asdict(self)
        for outcome in (row["live"]["outcome"], *row["simulated"]):
            placed = outcome.pop("placed")
            outcome["placed_by_instance"] = dict(sorted(Counter(placed.values()).items()))
        row["kept_up"] = self.live.machine.kept_up
        row["within"] = self.within
        row["within_range"] = self.within_range
        return row


def compare(trace_slice: Slice, policy: str, live: LiveRun) -> Row:
    """Simulate what ran live, with the control plane's measured delays. Raise SimulationError if that
    fails."""
    runs = [simulate_slice(trace_slice, policy, live.delays, trace_slice.seed + n) for n in range(SEEDS)]
    spreads: dict[str, list[Spread]] = {name: [getattr(run, name) for run in runs] for name in _FIGURES}
    means = {name: _mean(each) for name, each in spreads.items()}
    return Row(
        trace=trace_slice.trace,
        policy=policy,
        speed=trace_slice.shape.speed,
        live=live,
        simulated=runs,
        ratios={name: getattr(live.outcome, name).over(means[name]) for name in _FIGURES},
        simulated_range={name: _range(spreads[name], means[name]) for name in _FIGURES},
        same_instance=float(np.mean([_same_instance_share(live.outcome, run) for run in runs])),
        same_instance_simulated=float(np.mean([_same_instance_share(runs[0], run) for run in runs[1:]])),
        moved_share=float(np.mean([_distribution_distance(live.outcome, run) for run in runs])),
        moved_share_simulated=float(np.mean([_distribution_distance(runs[0], run) for run in runs[1:]])),
    )


def _mean(spreads: Sequence[Spread]) -> Spread:
    return Spread(*np.mean([[*each] for each in spreads], axis=0).tolist())


def _range(spreads: Sequence[Spread], mean: Spread) -> tuple[Spread, Spread]:
    ratios = [spread.over(mean) for spread in spreads]
    rows = [[*ratio] for ratio in ratios]
    return Spread(*np.min(rows, axis=0).tolist()), Spread(*np.max(rows, axis=0).tolist())


def _same_instance_share(one: Outcome, other: Outcome) -> float:
    """Return the share of equal placements among requests whose placement is known in both."""
    both = one.placed.keys() & other.placed.keys()
    return sum(one.placed[r] == other.placed[r] for r in both) / len(both) if both else float("nan")


def _distribution_distance(one: Outcome, other: Outcome) -> float:
    """Return half the L1 distance of the two distributions over instances."""
    ours, theirs = Counter(one.placed.values()), Counter(other.placed.values())
    if not ours or not theirs:
        return float("nan")
    names = ours.keys() | theirs.keys()
    return sum(abs(ours[n] / ours.total() - theirs[n] / theirs.total()) for n in names) / 2
