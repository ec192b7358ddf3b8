"""Find the least number of instances with which a workload keeps its SLO."""

from __future__ import annotations

import enum
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from simulator.cluster import InstanceSpec
from simulator.comparison import Cell
from simulator.parallel import Task, TaskProgress, run_tasks
from simulator.request import SimRequest
from simulator.scenario import Scenario, ScenarioResult, SimulatedFleet, kinds_of, run_brief
from simulator.workloads.resolve import WorkloadOptions, resolve_workload
from tailrace.policy.parameters import Value
from tailrace.profiles import Profile, load_profile
from tailrace.slo import Slo

# Numbers of instances below the least that are shown, for what they would cost.
STEPS_DOWN: Final = 2
# Means of shares are sums of rounded numbers.
_ROUNDING: Final = 1e-9


class Verdict(enum.Enum):
    """Whether enough requests meet the SLO, by the interval over the seeds; unsure: it contains what is
    required."""

    KEPT = "kept"
    UNSURE = "unsure"
    MISSED = "missed"


@dataclass(frozen=True, slots=True)
class Kind:
    """A profile of which the number of instances is sought, beside a fixed base of others."""

    name: str
    # NAME:COUNT,...; empty: none.
    base: str = ""

    @staticmethod
    def of(text: str) -> Kind:
        """Return the kind of `[NAME:COUNT,...]NAME`. Raise ValueError."""
        base, _, name = (part.strip() for part in text.rpartition(","))
        if name.rpartition(":")[2].isdecimal():
            raise ValueError(f"{text}: the last kind has no COUNT, since that is what is sought")
        kind = Kind(name, base)
        if base:
            kinds_of(kind.profile(1), None)
        return kind

    def __str__(self) -> str:
        return f"{self.base},{self.name}" if self.base else self.name

    @property
    def least(self) -> int:
        """Return the smallest possible number of instances."""
        return 0 if self.base else 1

    def profile(self, count: int) -> str:
        """Return the profile of a fleet with so many instances of this kind, as `kinds_of` reads it."""
        if not self.base:
            return f"{self.name}:{count}"
        return f"{self.base},{self.name}:{count}" if count else self.base

    def fleet(self, count: int, fleet: SimulatedFleet) -> SimulatedFleet:
        """Return `fleet` with so many instances of this kind."""
        profile = self.profile(count)
        return replace(fleet, profile=profile, instances=sum(each for _, each in kinds_of(profile, None)))


@dataclass(frozen=True, slots=True)
class SizePlan:
    """What to size: each policy with each kind of instance, for the same requests."""

    policies: Sequence[str]
    kinds: Sequence[Kind]
    workload: str
    seeds: Sequence[int]
    # The seed is set for each run.
    options: WorkloadOptions
    # But for the kind and number of its instances.
    fleet: SimulatedFleet
    slo: Slo
    # Share of the requests that must meet the SLO.
    attainment: float
    # The largest number of instances to try.
    most: int
    predicts: str | None = None
    # By policy, as in `Scenario`.
    parameters: Mapping[str, tuple[tuple[str, Value], ...]] = field(default_factory=dict)

    def scenario(self, policy: str, kind: Kind, count: int, seed: int) -> Scenario:
        """Return the scenario of one run."""
        options = replace(self.options, seed=seed)
        fleet, parameters = kind.fleet(count, self.fleet), self.parameters.get(policy, ())
        return Scenario(policy, self.workload, options, fleet, self.slo, self.predicts, parameters)

    def enough(self, cell: Cell) -> bool:
        """Return whether the SLO is kept in the mean over the seeds."""
        return cell.estimate("attainment").mean >= self.attainment - _ROUNDING

    def verdict(self, cell: Cell) -> Verdict:
        """Return whether the SLO is kept. A single seed has no interval, so it is never unsure."""
        value = cell.estimate("attainment")
        half = value.half_width or 0.0
        if self.enough(cell):
            return Verdict.KEPT if value.mean - half >= self.attainment - _ROUNDING else Verdict.UNSURE
        return Verdict.MISSED if value.mean + half < self.attainment - _ROUNDING else Verdict.UNSURE


@dataclass(frozen=True, slots=True)
class Size:
    """How many instances of a kind one policy needs; None: more than were tried."""

    policy: str
    kind: Kind
    least: int | None
    # All numbers that were simulated, ascending.
    cells: Mapping[int, Cell]

    @property
    def shown(self) -> list[int]:
        """Return the number needed and those just below it; the largest one if it is not enough."""
        if self.least is None:
            return [max(self.cells)]
        return [count for count in sorted(self.cells, reverse=True) if 0 <= self.least - count <= STEPS_DOWN]


@dataclass(frozen=True, slots=True)
class Sizing:
    """The outcome of a plan, in its order."""

    plan: SizePlan
    # A description of the origin of the requests.
    source: str
    sizes: Sequence[Size]

    def best(self, kind: Kind) -> Size | None:
        """Return the size with the fewest instances of a kind, the first of equal ones; None: all need
        more."""
        enough = [size for size in self.sizes if size.kind == kind and size.least is not None]
        return min(enough, key=lambda size: size.least or 0, default=None)

    def uneven(self) -> list[Size]:
        """Return those for which fewer instances than needed would also have kept the SLO.

        A search by halves presumes that more instances are never worse.
        """
        return [
            size
            for size in self.sizes
            if any(count < (size.least or 0) and self.plan.enough(cell) for count, cell in size.cells.items())
        ]


def size_fleets(
    plan: SizePlan,
    *,
    processes: int | None = None,
    progress: Callable[[TaskProgress], None] | None = None,
) -> Sizing:
    """Size every policy with every kind, on several processes.

    Raise WorkloadError for an unusable workload, and TaskError, which names the run that failed.
    """
    workload = resolve_workload(plan.workload, replace(plan.options, seed=plan.seeds[0]))
    guesses = {kind: _estimate(plan, kind, workload.requests) for kind in plan.kinds}
    pairs = [(policy, kind) for kind in plan.kinds for policy in plan.policies]
    searches = {(policy, kind): _least(kind.least, plan.most, guesses[kind]) for policy, kind in pairs}
    cells: dict[tuple[str, Kind], dict[int, Cell]] = {pair: {} for pair in pairs}
    least: dict[tuple[str, Kind], int | None] = {}
    asked = {pair: [next(search)] for pair, search in searches.items()}
    while asked:
        for pair, count, cell in _run(plan, asked, processes, progress):
            cells[pair][count] = cell
        following: dict[tuple[str, Kind], list[int]] = {}
        for pair, counts in asked.items():
            if pair in least:
                continue
            try:
                kept = plan.enough(cells[pair][counts[0]])
                following[pair] = [searches[pair].send(kept)]
            except StopIteration as end:
                least[pair] = found = end.value
                below = range(max(pair[1].least, (found or 0) - STEPS_DOWN), found or 0)
                following[pair] = [count for count in below if count not in cells[pair]]
        asked = {pair: counts for pair, counts in following.items() if counts}
    sizes = [Size(*pair, least[pair], dict(sorted(cells[pair].items()))) for pair in pairs]
    return Sizing(plan, workload.source, sizes)


def _least(least: int, most: int, guess: int) -> Generator[int, bool, int | None]:
    """Yield numbers from `least` to `most` to try, and take whether each is enough; return the smallest that
    is and whose predecessor is not, or None if `most` is not.

    The first is `guess`; the next are ever further from it, until one is enough and one is not. Fleets that
    are far too small take long to simulate.
    """
    low, high, step = least - 1, most + 1, 1
    probe = min(max(guess, least), most)
    while high - low > 1:
        if (yield probe):
            high = probe
            probe -= step
        else:
            low = probe
            probe += step
        step *= 2
        probe = (low + high) // 2 if low >= least and high <= most else min(max(probe, least), most)
    return high if high <= most else None


def _estimate(plan: SizePlan, kind: Kind, requests: Sequence[SimRequest]) -> int:
    """Return how many instances of a kind would have no idle time, beside those of its base: a guess."""
    counts = kinds_of(kind.profile(1), None)
    *base, needed = [(_instances(load_profile(name), requests), count) for name, count in counts]
    served = sum(count / alone for alone, count in base)
    return round(min(float(plan.most), max(0.0, 1.0 - served) * needed[0]))


def _instances(profile: Profile, requests: Sequence[SimRequest]) -> float:
    """Return how many instances of a profile would serve the requests with full batches."""
    prompts, outputs = (
        np.array([getattr(request, name) for request in requests], np.float64)
        for name in ("prompt_tokens", "output_tokens")
    )
    mean_kv = float(np.mean(prompts + outputs / 2))
    seats = min(max(profile.kv_capacity_tokens / mean_kv, 1.0), float(InstanceSpec("", profile).max_num_seqs))
    step_s = profile.step_ms(0.0, round(seats), round(seats * mean_kv)) / 1e3
    prefill_s = sum(profile.prefill.ms(0, request.prompt_tokens) for request in requests) / 1e3
    # The last ones are served after the last arrival.
    span_s = requests[-1].arrival_s - requests[0].arrival_s + float(np.mean(outputs)) * step_s
    return (prefill_s + float(np.sum(outputs)) * step_s / seats) / span_s


def _run(
    plan: SizePlan,
    asked: Mapping[tuple[str, Kind], Sequence[int]],
    processes: int | None,
    progress: Callable[[TaskProgress], None] | None,
) -> list[tuple[tuple[str, Kind], int, Cell]]:
    """Simulate these numbers of instances, with every seed."""
    tasks: dict[tuple[tuple[str, Kind], int, int], Task[ScenarioResult]] = {}
    for pair, counts in asked.items():
        for count in counts:
            for seed in plan.seeds:
                policy, kind = pair
                name = f"{policy} with {kind.profile(count)}, seed {seed}"
                tasks[pair, count, seed] = Task(name, run_brief, (plan.scenario(policy, kind, count, seed),))
    done = run_tasks(list(tasks.values()), processes=processes, progress=progress)
    cells = []
    for pair, counts in asked.items():
        for count in counts:
            outcomes = [done[tasks[pair, count, seed].name] for seed in plan.seeds]
            cells.append((pair, count, Cell(pair[0], plan.workload, plan.options.rate_per_s, outcomes)))
    return cells
