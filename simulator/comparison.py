"""Several policies on several workloads at several rates, over seeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from simulator.estimate import Best, Estimate, best_of, estimate
from simulator.parallel import Progress, Task, run_tasks
from simulator.scenario import Fleet, Outcome, Scenario, run_brief, run_scenario
from simulator.workloads.base import Workload
from simulator.workloads.resolve import WorkloadOptions
from tailrace.policy.parameters import Value
from tailrace.slo import Slo

# Figures that are compared: 1 where more is better, -1 where less is.
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
    """What to compare. Every policy meets the same requests."""

    policies: Sequence[str]
    workloads: Sequence[str]
    # Mean rates in requests a second; None: a trace at its own.
    rates: Sequence[float | None]
    seeds: Sequence[int]
    # What all runs share; rate and seed are set for each.
    options: WorkloadOptions
    fleet: Fleet
    slo: Slo
    predicts: str | None = None
    # Where each seed's stretch of a trace begins, in seconds of its own time; of others every seed starts
    # where the options say.
    starts_s: Mapping[str, Sequence[float]] = field(default_factory=dict)
    # By policy, as in `Scenario`.
    parameters: Mapping[str, tuple[tuple[str, Value], ...]] = field(default_factory=dict)

    def scenario(self, policy: str, workload: str, rate: float | None, seed: int) -> Scenario:
        """One run of it."""
        options = replace(self.options, rate_per_s=rate, seed=seed)
        if workload in self.starts_s:
            options = replace(options, start_s=self.starts_s[workload][self.seeds.index(seed)])
        given = self.parameters.get(policy, ())
        return Scenario(policy, workload, options, self.fleet, self.slo, self.predicts, given)


@dataclass(frozen=True, slots=True)
class Cell:
    """One policy on one workload at one rate: an outcome a seed."""

    policy: str
    workload: str
    rate: float | None
    outcomes: Sequence[Outcome]

    def values(self, figure: str) -> list[float]:
        """One value a seed."""
        return [float(outcome.figures.as_dict()[figure]) for outcome in self.outcomes]

    def estimate(self, figure: str) -> Estimate:
        """Mean over the seeds, with its interval."""
        return estimate(self.values(figure))


@dataclass(frozen=True, slots=True)
class Group:
    """All policies on one workload at one rate, in the order asked for."""

    workload: str
    rate: float | None
    cells: Sequence[Cell]

    @property
    def name(self) -> str:
        """The workload's, for a reader."""
        return self.cells[0].outcomes[0].scenario.workload_name

    def best(self, figure: str) -> Best | None:
        """Of a figure of BETTER."""
        return best_of({cell.policy: cell.values(figure) for cell in self.cells}, BETTER[figure])


@dataclass(frozen=True, slots=True)
class Comparison:
    """What came out, a group for each workload and rate, in the order of the plan."""

    plan: Plan
    groups: Sequence[Group]


def compare(
    plan: Plan,
    *,
    processes: int | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Comparison:
    """Run all of it on the cores. Raises TaskError, which names the run that failed.

    The first seed at each workload's highest rate comes with its detail.
    """
    highest = max(plan.rates, key=lambda rate: rate or 0.0)
    tasks: dict[tuple[str, str, float | None, int], Task[Outcome]] = {}
    for workload in plan.workloads:
        for rate in plan.rates:
            for policy in plan.policies:
                for seed in plan.seeds:
                    drawn = rate == highest and seed == plan.seeds[0]
                    scenario = plan.scenario(policy, workload, rate, seed)
                    # More load, more decisions and more steps.
                    cost = 1.0 + (rate or 0.0) / (highest or 1.0)
                    run = run_scenario if drawn else run_brief
                    tasks[policy, workload, rate, seed] = Task(_name(scenario), run, (scenario,), cost)
    done = run_tasks(list(tasks.values()), processes=processes, progress=progress)

    def cell(policy: str, workload: str, rate: float | None) -> Cell:
        outcomes = [done[tasks[policy, workload, rate, seed].name] for seed in plan.seeds]
        return Cell(policy, workload, rate, outcomes)

    groups = [
        Group(workload, rate, [cell(policy, workload, rate) for policy in plan.policies])
        for workload in plan.workloads
        for rate in plan.rates
    ]
    return Comparison(plan, groups)


def stretches_s(workload: Workload, count: int, seeds: int) -> list[float]:
    """Where `seeds` stretches of `count` requests begin, as far apart as the trace allows, in seconds.

    A trace has nothing random: runs over one stretch differ in next to nothing, however many, and an
    interval over them would say nothing of other hours.
    """
    spare = max(0, len(workload.requests) - count)
    return [workload.requests[spare * place // max(1, seeds - 1)].arrival_s for place in range(seeds)]


def _name(scenario: Scenario) -> str:
    rate = scenario.options.rate_per_s
    at = "" if rate is None else f" at {rate:g}/s"
    return f"{scenario.policy} on {scenario.workload}{at}, seed {scenario.options.seed}"
