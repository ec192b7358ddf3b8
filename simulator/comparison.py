"""Compare several policies on several workloads, rates and seeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from simulator.estimate import Best, Estimate, best_of, estimate
from simulator.parallel import Task, TaskProgress, run_tasks
from simulator.scenario import Scenario, ScenarioResult, SimulatedFleet, run_brief, run_scenario
from simulator.setups import Setup
from simulator.workloads.base import Workload
from simulator.workloads.resolve import WorkloadOptions
from tailrace.policy.parameters import Value
from tailrace.slo import Slo

# Figures that are compared: 1 if more is better, -1 if less is.
BETTER: Mapping[str, int] = {
    "attainment": 1,
    "goodput_per_s": 1,
    "ttft_p50_s": -1,
    "ttft_p99_s": -1,
    "tpot_p50_s": -1,
    "tpot_p99_s": -1,
    "latency_p50_s": -1,
    "latency_p99_s": -1,
    "tokens_per_s": 1,
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What to compare. All policies serve the same requests."""

    policies: Sequence[str]
    workloads: Sequence[str]
    # Mean rates in requests per second; None: a trace's own.
    rates: Sequence[float | None]
    seeds: Sequence[int]
    # Options of all runs; rate and seed are set for each.
    options: WorkloadOptions
    fleet: SimulatedFleet
    slo: Slo
    predicts: str | None = None
    # Start of each seed's section of a trace, in seconds of its own time; other workloads start where the
    # options say.
    starts_s: Mapping[str, Sequence[float]] = field(default_factory=dict)
    # By policy, as in `Scenario`.
    parameters: Mapping[str, tuple[tuple[str, Value], ...]] = field(default_factory=dict)

    def scenario(self, policy: str, workload: str, rate: float | None, seed: int) -> Scenario:
        """Return the scenario of one run."""
        options = replace(self.options, rate_per_s=rate, seed=seed)
        if workload in self.starts_s:
            options = replace(options, start_s=self.starts_s[workload][self.seeds.index(seed)])
        parameters = self.parameters.get(policy, ())
        return Scenario(policy, workload, options, self.fleet, self.slo, self.predicts, parameters)

    def setups(self) -> list[Setup]:
        """Return the contestants' setups."""
        workload, rate, seed = self.workloads[0], self.rates[0], self.seeds[0]
        return [self.scenario(policy, workload, rate, seed).setup() for policy in self.policies]


@dataclass(frozen=True, slots=True)
class Cell:
    """One policy on one workload at one rate, with an outcome per seed."""

    policy: str
    workload: str
    rate: float | None
    outcomes: Sequence[ScenarioResult]

    def values(self, figure: str) -> list[float]:
        """Return a figure's value for each seed."""
        return [float(outcome.figures.as_dict()[figure]) for outcome in self.outcomes]

    def estimate(self, figure: str) -> Estimate:
        """Return a figure's mean over the seeds, with its confidence interval."""
        return estimate(self.values(figure))


@dataclass(frozen=True, slots=True)
class Group:
    """All policies on one workload at one rate, in the order of the plan."""

    workload: str
    rate: float | None
    cells: Sequence[Cell]

    @property
    def name(self) -> str:
        """Return the workload's name for display."""
        return self.cells[0].outcomes[0].scenario.workload_name

    def best(self, figure: str) -> Best | None:
        """Return the best policy by a figure of BETTER, or None if no policy has a value."""
        return best_of({cell.policy: cell.values(figure) for cell in self.cells}, BETTER[figure])


@dataclass(frozen=True, slots=True)
class Comparison:
    """The outcomes, in a group per workload and rate, in the order of the plan."""

    plan: Plan
    groups: Sequence[Group]
    # By Ctrl-C: the groups have the seeds that all policies have finished, and those without one are missing.
    interrupted: bool = False


def compare(
    plan: Plan,
    *,
    processes: int | None = None,
    progress: Callable[[TaskProgress], None] | None = None,
) -> Comparison:
    """Run a plan on several processes. Raise TaskError, which names the run that failed.

    The outcomes of the first seed at the highest rate include their detail. Ctrl-C ends it early; raise
    KeyboardInterrupt if nothing can be compared by then.
    """
    highest = max(plan.rates, key=lambda rate: rate or 0.0)
    tasks: dict[tuple[str, str, float | None, int], Task[ScenarioResult]] = {}
    for workload in plan.workloads:
        for rate in plan.rates:
            # All policies on one seed, then the next, for what there is when it is interrupted.
            for seed in plan.seeds:
                for policy in plan.policies:
                    drawn = rate == highest and seed == plan.seeds[0]
                    scenario = plan.scenario(policy, workload, rate, seed)
                    # A higher load means more decisions and more steps.
                    cost = 1.0 + (rate or 0.0) / (highest or 1.0)
                    run = run_scenario if drawn else run_brief
                    tasks[policy, workload, rate, seed] = Task(_name(scenario), run, (scenario,), cost)
    done: dict[str, ScenarioResult] = {}
    interrupted = False
    try:
        run_tasks(list(tasks.values()), processes=processes, progress=progress, succeeded=done.__setitem__)
    except KeyboardInterrupt:
        interrupted = True

    def finished(workload: str, rate: float | None) -> list[int]:
        return [
            seed
            for seed in plan.seeds
            if all(tasks[policy, workload, rate, seed].name in done for policy in plan.policies)
        ]

    def cell(policy: str, workload: str, rate: float | None, seeds: Sequence[int]) -> Cell:
        outcomes = [done[tasks[policy, workload, rate, seed].name] for seed in seeds]
        return Cell(policy, workload, rate, outcomes)

    groups = [
        Group(workload, rate, [cell(policy, workload, rate, seeds) for policy in plan.policies])
        for workload in plan.workloads
        for rate in plan.rates
        if (seeds := finished(workload, rate))
    ]
    if not groups:
        raise KeyboardInterrupt
    return Comparison(plan, groups, interrupted)


def section_starts_s(workload: Workload, count: int, seeds: int) -> list[float]:
    """Return the start of `seeds` sections of `count` requests, as far apart as the trace allows, in seconds.

    A trace has no randomness: runs over one section hardly differ, and a confidence interval over them would
    say nothing about other sections.
    """
    spare = max(0, len(workload.requests) - count)
    return [workload.requests[spare * index // max(1, seeds - 1)].arrival_s for index in range(seeds)]


def _name(scenario: Scenario) -> str:
    rate = scenario.options.rate_per_s
    at = "" if rate is None else f" at {rate:g}/s"
    return f"{scenario.policy} on {scenario.workload}{at}, seed {scenario.options.seed}"
