"""Several schedulers, and placement leases, against one scheduler, in the simulator.

How to go beyond one scheduler (docs/fleet-size.md): N instances are divided among 2 to 16 schedulers, of
which each request asks a random one, its session's, the emptier of two, or two and takes the better answer;
or one scheduler leases placements to eight front ends. All ways serve the same requests under one policy.

Loads are shares of the rate per instance that the policy sustains with one scheduler: the highest, in steps
of 10%, at which 99% of requests meet their SLOs on 16 instances. Figures are means over seeds with the
half-width of their 95% confidence interval, of requests that arrive after the first third of the run.
Imbalance: the standard deviation of the used KV over the instances, divided by their mean. Calls: of a
scheduler, per placement. The time that a call takes is not simulated.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, TypeVar

from rich.console import Console
from rich.progress import Progress

from experiments.shards.measure import SEARCHED, Case, Outcome, measure, sustained_rate
from experiments.shards.tables import groups, table
from experiments.shards.ways import ALL, FEW, SESSIONS, WORKLOADS, Way
from simulator.parallel import Task, run_tasks
from simulator.parallel import TaskProgress as Done
from tests.harness.report import print_json, save, table_console

FRONT_ENDS: Final = 8
_POLICIES: Final = ("tailrace", "pascal")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the benchmark: one workload on one fleet."""

    workload: str
    policies: tuple[str, ...]
    instances: int
    loads: tuple[float, ...]
    ways: tuple[Way, ...]

    @property
    def name(self) -> str:
        """Its name for --only."""
        return f"{self.workload}-{self.instances}"

    def cases(self, rates: dict[tuple[str, str], float], seeds: int, seconds: float) -> list[Case]:
        """Return all cases, given the sustained rates per instance by (workload, policy)."""
        return [
            Case(
                workload=self.workload,
                policy=policy,
                instances=self.instances,
                load=load,
                rate_per_s=load * rates[self.workload, policy] * self.instances,
                way=way,
                seed=seed,
                seconds=seconds,
                front_ends=FRONT_ENDS,
            )
            for policy in self.policies
            for load in self.loads
            for way in self.ways
            for seed in range(1, seeds + 1)
        ]


PARTS: Final = (
    Part("chat", _POLICIES, 64, (0.7, 0.9), ALL),
    Part("chat", _POLICIES, 256, (0.9,), FEW),
    Part("reasoning", _POLICIES, 64, (0.9,), FEW),
    Part("sessions", ("tailrace",), 64, (0.9,), SESSIONS),
)
QUICK: Final = (Part("chat", _POLICIES, SEARCHED, (0.9,), FEW),)


def search(parts: Sequence[Part], shorter: float, console: Console) -> dict[tuple[str, str], float]:
    """Return the sustained rates per instance by workload and policy."""
    tasks = [
        Task(
            f"{workload}: {policy}", sustained_rate, (workload, policy, shorter * WORKLOADS[workload].seconds)
        )
        for workload, policy in sorted(
            {(part.workload, policy) for part in parts for policy in part.policies}
        )
    ]
    rates = _run(tasks, "searching rates", console)
    for name, rate in rates.items():
        console.print(f"{name} sustains {rate:.2f} requests/s per instance")
    return {(name.partition(": ")[0], name.partition(": ")[2]): rate for name, rate in rates.items()}


def run(parts: Sequence[Part], seeds: int, shorter: float, console: Console) -> list[Outcome]:
    """Run all simulations; return the outcomes in the order of the parts."""
    rates = search(parts, shorter, console)
    cases = [
        case
        for part in parts
        for case in part.cases(rates, seeds, shorter * WORKLOADS[part.workload].seconds)
    ]
    tasks = [
        Task(f"{n}: {case.workload}, {case.policy}, {case.way.name}", measure, (case,), case.requests)
        for n, case in enumerate(cases)
    ]
    return list(_run(tasks, "simulating", console).values())


def _run(tasks: Sequence[Task[T]], title: str, console: Console) -> dict[str, T]:
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task(title, total=1.0)

        def show(done: Done) -> None:
            progress.update(bar, completed=done.share)

        return run_tasks(tasks, progress=show)


def main(arguments: Sequence[str] | None = None) -> Path:
    """Run the benchmark; return the path of the figures."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.shards",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only",
        choices=[part.name for part in PARTS],
        help="one workload and fleet",
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--quick", action="store_true", help="16 instances, one seed, a third of the duration"
    )
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    options = parser.parse_args(arguments)
    console = Console(stderr=True)
    began_s = time.perf_counter()
    parts = QUICK if options.quick else [p for p in PARTS if options.only in (None, p.name)]
    seeds, shorter = (1, 1 / 3) if options.quick else (options.seeds, 1.0)
    outcomes = run(parts, seeds, shorter, console)
    figures: dict[str, object] = {
        "seconds": round(time.perf_counter() - began_s, 1),
        "seeds": seeds,
        "front_ends": FRONT_ENDS,
        "runs": [asdict(outcome) for outcome in outcomes],
    }
    suffix = "-quick" if options.quick else f"-{options.only}" if options.only else ""
    path = save(f"shards{suffix}", figures)
    if options.output == "json":
        print_json("shards", figures)
    else:
        printed = table_console(190)
        for group in groups(outcomes):
            printed.print(table(group))
    console.print(f"{len(outcomes)} runs in {time.perf_counter() - began_s:.0f} s; saved to {path}")
    return path


if __name__ == "__main__":
    main()
