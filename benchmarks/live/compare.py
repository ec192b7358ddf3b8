"""One slice under one policy, live and simulated, side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final

import numpy as np

from benchmarks.live.figures import Spread
from benchmarks.live.outcome import Outcome
from benchmarks.live.replay import LiveRun
from benchmarks.live.simulated import simulated
from benchmarks.live.slices import Slice

# The simulator differs from itself by when the workers' reports happen to be due.
SEEDS: Final = 12
# What live and simulated latencies may differ by.
TOLERANCE: Final = 0.15
_FIGURES: Final = ("ttft", "tpot", "latency")


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison. Ratios are live / simulated, the simulator's being the mean of its seeds."""

    trace: str
    policy: str
    # Of the engines, against their profile.
    speed: float
    live: LiveRun
    simulated: Sequence[Outcome]
    ratios: Mapping[str, Spread]
    # Smallest and largest of the simulator's seeds over their mean.
    simulated_range: Mapping[str, tuple[Spread, Spread]]
    # Share of requests placed on the same instance: live and simulated; simulated with another seed.
    same_instance: float
    same_instance_simulated: float
    # Share of requests that would have to change place for equal numbers on each instance; the same two.
    moved_share: float
    moved_share_simulated: float

    @property
    def within(self) -> bool | None:
        """Whether every latency is within the tolerance; None: the machine could not keep up."""
        if not self.live.machine.kept_up:
            return None
        return all(abs(ratio - 1.0) <= TOLERANCE for ratio, _, _ in self._figures())

    @property
    def within_range(self) -> bool | None:
        """The same, of the nearest of the simulator's seeds: it differs from itself."""
        if not self.live.machine.kept_up:
            return None
        low, high = 1.0 - TOLERANCE, 1.0 + TOLERANCE
        return all(low * least <= ratio <= high * most for ratio, least, most in self._figures())

    def _figures(self) -> Iterator[tuple[float, float, float]]:
        """Each ratio, with the smallest and the largest of the simulator's seeds over their mean."""
        for name, ratio in self.ratios.items():
            least, most = self.simulated_range[name]
            for each in zip(ratio, least, most, strict=True):
                # Where there is nothing there is nothing to compare.
                if not np.isnan(each[0]):
                    yield each

    def as_dict(self) -> dict[str, object]:
        """For JSON; where each request was placed is left out."""
        row = asdict(self)
        for outcome in (row["live"]["outcome"], *row["simulated"]):
            placed = outcome.pop("placed")
            outcome["placed_by_instance"] = dict(sorted(Counter(placed.values()).items()))
        row["kept_up"] = self.live.machine.kept_up
        row["within"] = self.within
        row["within_range"] = self.within_range
        return row


def compare(taken: Slice, policy: str, live: LiveRun) -> Row:
    """Simulate what ran live, with the control plane's measured delays. Raises SimulationError."""
    runs = [simulated(taken, policy, live.delays, taken.seed + n) for n in range(SEEDS)]
    spreads: dict[str, list[Spread]] = {name: [getattr(run, name) for run in runs] for name in _FIGURES}
    means = {name: _mean(each) for name, each in spreads.items()}
    return Row(
        trace=taken.trace,
        policy=policy,
        speed=taken.shape.speed,
        live=live,
        simulated=runs,
        ratios={name: getattr(live.outcome, name).over(means[name]) for name in _FIGURES},
        simulated_range={name: _range(spreads[name], means[name]) for name in _FIGURES},
        same_instance=float(np.mean([_same(live.outcome, run) for run in runs])),
        same_instance_simulated=float(np.mean([_same(runs[0], run) for run in runs[1:]])),
        moved_share=float(np.mean([_moved(live.outcome, run) for run in runs])),
        moved_share_simulated=float(np.mean([_moved(runs[0], run) for run in runs[1:]])),
    )


def _mean(spreads: Sequence[Spread]) -> Spread:
    return Spread(*np.mean([[*each] for each in spreads], axis=0).tolist())


def _range(spreads: Sequence[Spread], mean: Spread) -> tuple[Spread, Spread]:
    ratios = [spread.over(mean) for spread in spreads]
    rows = [[*ratio] for ratio in ratios]
    return Spread(*np.min(rows, axis=0).tolist()), Spread(*np.max(rows, axis=0).tolist())


def _same(one: Outcome, other: Outcome) -> float:
    """Of the requests of which both know where they were placed."""
    both = one.placed.keys() & other.placed.keys()
    return sum(one.placed[r] == other.placed[r] for r in both) / len(both) if both else float("nan")


def _moved(one: Outcome, other: Outcome) -> float:
    """Half the distance of the two distributions over instances."""
    ours, theirs = Counter(one.placed.values()), Counter(other.placed.values())
    if not ours or not theirs:
        return float("nan")
    names = ours.keys() | theirs.keys()
    return sum(abs(ours[n] / ours.total() - theirs[n] / theirs.total()) for n in names) / 2
