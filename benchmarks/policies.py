"""`make bench-policies`: every policy on every paper's ground and on a mix of them (docs/policy-tailrace.md).

Rates are 60, 85 and 110% of the one that the best policy of the four papers, or least-loaded, sustains: the
highest found at which it keeps the SLOs of nine requests in ten (Arrow's target), searched in steps of 25%
with a seed of its own. Each seed is another stretch of the trace, or other draws. Figures are means with the
half-width of their 95% confidence interval; the comparison with the best paper is paired by seed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress

from benchmarks.contestants import ALL, OURS, PAPERS, prepare
from benchmarks.grounds import GROUNDS, Ground
from benchmarks.policy_outcome import Outcome
from benchmarks.policy_tables import group_table, rivals_table, summary_table
from benchmarks.report import print_json, save
from simulator.simulation import simulate

SHARES = (0.6, 0.85, 1.1)
TARGET = 0.9
_STEP = 1.25
# Also the seed of the search; those of the figures begin after it.
_SEARCH_SEED = 1_000
_MOST_STEPS = 20
# Requests of a run, at least: P99 is of a hundred.
_LEAST = 100


@dataclass(frozen=True, slots=True)
class Scene:
    """A ground as a process can be told of it: by name, with how long requests arrive, and from where."""

    name: str
    seconds: float
    traces: Path | None

    @property
    def ground(self) -> Ground:
        """The ground itself."""
        return next(ground for ground in GROUNDS if ground.name == self.name)


def measure(scene: Scene, share: float, rate: float, seed: int, name: str) -> Outcome:
    """Simulate one."""
    ground = scene.ground
    requests = ground.draw(max(_LEAST, round(scene.seconds * rate)), rate, seed, scene.traces)
    contestant = prepare(name, ground, sum(r.output_tokens for r in requests) / len(requests))
    result = simulate(contestant.spec, requests, contestant.policy, contestant.intra, seed=seed)
    done = [r for r in result.requests if r.ttft_s is not None and r.tpot_s is not None]
    ttft = np.array([r.ttft_s for r in done], dtype=np.float64)
    tpot = np.array([r.tpot_s for r in done], dtype=np.float64)
    attained = sum(ground.good(r) for r in result.requests) / len(requests)
    return Outcome(
        ground=ground.name,
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


def sustained(scene: Scene) -> float:
    """The highest rate, in steps of 25%, at which one of the papers' policies or least-loaded attains 90%."""

    def holds(rate: float) -> bool:
        # The one that held last is most likely to hold again.
        for name in list(order):
            if measure(scene, 0.0, rate, _SEARCH_SEED, name).attained >= TARGET:
                order.remove(name)
                order.insert(0, name)
                return True
        return False

    order = ["least_loaded", *PAPERS]
    rate = scene.ground.first_rate_per_s
    if holds(rate):
        for _ in range(_MOST_STEPS):
            if not holds(rate * _STEP):
                return rate
            rate *= _STEP
        return rate
    for _ in range(_MOST_STEPS):
        rate /= _STEP
        if holds(rate):
            return rate
    raise RuntimeError(f"{scene.name}: nobody sustains {rate:g} requests/s")


def run(scenes: Sequence[Scene], shares: Sequence[float], seeds: int, console: Console) -> list[Outcome]:
    """All of them, on all cores."""
    outcomes: list[Outcome] = []
    with (
        ProcessPoolExecutor(max_workers=os.cpu_count()) as pool,
        Progress(console=console, transient=True) as progress,
    ):
        task = progress.add_task("searching rates", total=len(scenes))
        searches = {pool.submit(sustained, scene): scene for scene in scenes}
        runs = []
        for search in as_completed(searches):
            scene, rate = searches[search], search.result()
            progress.advance(task)
            runs += [
                pool.submit(measure, scene, share, share * rate, seed, name)
                for share in shares
                for seed in range(1, seeds + 1)
                for name in ALL
            ]
        task = progress.add_task("simulating", total=len(runs))
        for finished in as_completed(runs):
            outcomes.append(finished.result())
            progress.advance(task)
    order = {scene.name: n for n, scene in enumerate(scenes)}
    outcomes.sort(key=lambda o: (order[o.ground], o.share, ALL.index(o.policy), o.seed))
    return outcomes


def chosen(only: str, quick: bool, traces: Path | None, console: Console) -> list[Scene]:
    """Grounds to run; those whose traces are not at hand are left out, and that is said."""
    kept: list[Scene] = []
    for ground in GROUNDS:
        if only and only not in ground.name:
            continue
        if ground.needs_traces and traces is None:
            console.print(f"{ground.name}: left out, it needs --data or TAILRACE_DATA")
            continue
        kept.append(Scene(ground.name, ground.seconds / 2 if quick else ground.seconds, traces))
    return kept


def report(outcomes: Sequence[Outcome], console: Console) -> None:
    """Tables for a terminal."""
    for ground in dict.fromkeys(o.ground for o in outcomes):
        console.print(group_table(ground, [o for o in outcomes if o.ground == ground]))
    console.print(summary_table(OURS, outcomes))
    console.print(rivals_table(OURS, outcomes))


def main(arguments: Iterable[str] | None = None) -> Path:
    """Run the benchmark; returns where the figures are."""
    parser = argparse.ArgumentParser(prog="make bench-policies", description=__doc__)
    parser.add_argument(
        "--data", type=Path, default=os.environ.get("TAILRACE_DATA"), help="folder that traces/ is in"
    )
    parser.add_argument("--only", default="", help="grounds whose name contains this")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="two seeds, half as long, one rate")
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    given = parser.parse_args(None if arguments is None else list(arguments))
    console = Console(stderr=True)
    began_s = time.perf_counter()
    seeds, shares = (2, SHARES[1:2]) if given.quick else (given.seeds, SHARES)
    traces = None if given.data is None else Path(given.data)
    outcomes = run(chosen(given.only, given.quick, traces, console), shares, seeds, console)
    figures: dict[str, object] = {
        "seconds": round(time.perf_counter() - began_s, 1),
        "seeds": seeds,
        "quick": given.quick,
        "runs": [asdict(outcome) for outcome in outcomes],
    }
    name = "policies-quick" if given.quick else "policies"
    path = save(name if not given.only else f"{name}-{given.only}", figures)
    if given.output == "json":
        print_json("policies", figures)
    else:
        # A file or a pipe has no width of its own.
        report(outcomes, Console(width=None if sys.stdout.isatty() else 120))
    console.print(f"{len(outcomes)} runs in {time.perf_counter() - began_s:.0f} s; saved to {path}")
    return path


if __name__ == "__main__":
    main()
