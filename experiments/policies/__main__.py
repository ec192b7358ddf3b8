"""Every policy in every paper's scenario and in a mix of them (docs/policy-tailrace.md).

Rates are 60, 85 and 110% of the one that the best policy of the four papers, or least-loaded, sustains: the
highest rate found at which it meets the SLOs of 90% of requests (Arrow's target), searched in steps of 25%
with a separate seed. Each seed is another part of the trace, or other draws. Figures are means with the
half-width of their 95% confidence interval; the comparison with the best paper is paired by seed.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress

from experiments.policies.contestants import ALL, OURS, PAPERS, prepare
from experiments.policies.outcome import Outcome
from experiments.policies.tables import group_table, rivals_table, summary_table
from experiments.scenarios import SCENARIOS, Scenario
from simulator.simulation import simulate
from tests.harness.report import print_json, save, table_console

SHARES = (0.6, 0.85, 1.1)
TARGET = 0.9
_STEP = 1.25
# The seed of the search; those of the figures are below it.
_SEARCH_SEED = 1_000
_MAX_STEPS = 20
# Minimum requests per run: P99 needs a hundred.
_MIN_REQUESTS = 100


@dataclass(frozen=True, slots=True)
class ScenarioRun:
    """A scenario as passed to a process: by name, with the duration of arrivals and the folder of traces."""

    name: str
    seconds: float
    traces: Path | None

    @property
    def scenario(self) -> Scenario:
        """The scenario itself."""
        return next(scenario for scenario in SCENARIOS if scenario.name == self.name)


def measure(scenario_run: ScenarioRun, share: float, rate: float, seed: int, name: str) -> Outcome:
    """Simulate one policy."""
    scenario = scenario_run.scenario
    requests = scenario.draw(
        max(_MIN_REQUESTS, round(scenario_run.seconds * rate)), rate, seed, scenario_run.traces
    )
    contestant = prepare(name, scenario, sum(r.output_tokens for r in requests) / len(requests))
    result = simulate(contestant.spec, requests, contestant.policy, contestant.intra, seed=seed)
    done = [r for r in result.requests if r.ttft_s is not None and r.tpot_s is not None]
    ttft = np.array([r.ttft_s for r in done], dtype=np.float64)
    tpot = np.array([r.tpot_s for r in done], dtype=np.float64)
    attained = sum(scenario.meets_slos(r) for r in result.requests) / len(requests)
    return Outcome(
        ground=scenario.name,
        share=share,
        rate_per_s=rate,
        seed=seed,
        policy=name,
        attained=attained,
        goodput_per_s=attained * rate,
        ttft_mean_s=float(ttft.mean()),
        ttft_p99_s=float(np.quantile(ttft, 0.99)),
        tpot_mean_s=float(tpot.mean()),
        tpot_p99_s=float(np.quantile(tpot, 0.99)),
        qoe_missed=sum(r.qoe is not None and r.qoe < 0.95 for r in done) / len(done),
        preemptions=sum(r.preemptions_swapped + r.preemptions_recomputed for r in done),
        migrations=sum(r.migrations for r in done),
    )


def find_sustained_rate(scenario_run: ScenarioRun) -> float:
    """Return the highest rate, in steps of 25%, at which a paper's policy or least-loaded attains 90%. Raise
    RuntimeError if none does at any rate."""

    def holds(rate: float) -> bool:
        # Try the last successful policy first: it is the most likely to succeed again.
        for name in list(order):
            if measure(scenario_run, 0.0, rate, _SEARCH_SEED, name).attained >= TARGET:
                order.remove(name)
                order.insert(0, name)
                return True
        return False

    order = ["least_loaded", *PAPERS]
    rate = scenario_run.scenario.first_rate_per_s
    if holds(rate):
        for _ in range(_MAX_STEPS):
            if not holds(rate * _STEP):
                return rate
            rate *= _STEP
        return rate
    for _ in range(_MAX_STEPS):
        rate /= _STEP
        if holds(rate):
            return rate
    raise RuntimeError(f"{scenario_run.name}: no policy sustains {rate:g} requests/s")


def run(
    scenario_runs: Sequence[ScenarioRun], shares: Sequence[float], seeds: int, console: Console
) -> list[Outcome]:
    """Run all simulations, on all cores."""
    outcomes: list[Outcome] = []
    with (
        ProcessPoolExecutor(max_workers=os.cpu_count()) as pool,
        Progress(console=console, transient=True) as progress,
    ):
        task = progress.add_task("searching rates", total=len(scenario_runs))
        searches = {
            pool.submit(find_sustained_rate, scenario_run): scenario_run for scenario_run in scenario_runs
        }
        runs = []
        for search in as_completed(searches):
            scenario_run, rate = searches[search], search.result()
            progress.advance(task)
            runs += [
                pool.submit(measure, scenario_run, share, share * rate, seed, name)
                for share in shares
                for seed in range(1, seeds + 1)
                for name in ALL
            ]
        task = progress.add_task("simulating", total=len(runs))
        for finished in as_completed(runs):
            outcomes.append(finished.result())
            progress.advance(task)
    order = {scenario_run.name: n for n, scenario_run in enumerate(scenario_runs)}
    outcomes.sort(key=lambda o: (order[o.ground], o.share, ALL.index(o.policy), o.seed))
    return outcomes


def select_scenarios(only: str, quick: bool, traces: Path | None, console: Console) -> list[ScenarioRun]:
    """Return the selected scenarios, without those whose traces are missing, which are reported."""
    selected: list[ScenarioRun] = []
    for scenario in SCENARIOS:
        if only and only not in scenario.name:
            continue
        if scenario.needs_traces and traces is None:
            console.print(f"{scenario.name}: skipped; it needs --data or TAILRACE_DATA")
            continue
        selected.append(
            ScenarioRun(scenario.name, scenario.seconds / 2 if quick else scenario.seconds, traces)
        )
    return selected


def report(outcomes: Sequence[Outcome], console: Console) -> None:
    """Print the tables."""
    for ground in dict.fromkeys(o.ground for o in outcomes):
        console.print(group_table(ground, [o for o in outcomes if o.ground == ground]))
    console.print(summary_table(OURS, outcomes))
    console.print(rivals_table(OURS, outcomes))


def main(arguments: Iterable[str] | None = None) -> Path:
    """Run the benchmark; return the path of the figures."""
    parser = argparse.ArgumentParser(prog="python -m experiments.policies", description=__doc__)
    parser.add_argument(
        "--data", type=Path, default=os.environ.get("TAILRACE_DATA"), help="folder that contains traces/"
    )
    parser.add_argument("--only", default="", help="scenarios whose name contains this")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="two seeds, half the duration, one rate")
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    options = parser.parse_args(None if arguments is None else list(arguments))
    console = Console(stderr=True)
    began_s = time.perf_counter()
    seeds, shares = (2, SHARES[1:2]) if options.quick else (options.seeds, SHARES)
    traces = None if options.data is None else Path(options.data)
    outcomes = run(select_scenarios(options.only, options.quick, traces, console), shares, seeds, console)
    figures: dict[str, object] = {
        "seconds": round(time.perf_counter() - began_s, 1),
        "seeds": seeds,
        "quick": options.quick,
        "runs": [asdict(outcome) for outcome in outcomes],
    }
    name = "policies-quick" if options.quick else "policies"
    path = save(name if not options.only else f"{name}-{options.only}", figures)
    if options.output == "json":
        print_json("policies", figures)
    else:
        report(outcomes, table_console(120))
    console.print(f"{len(outcomes)} runs in {time.perf_counter() - began_s:.0f} s; saved to {path}")
    return path


if __name__ == "__main__":
    main()
