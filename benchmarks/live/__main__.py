"""`make bench-live`: a slice of each trace through the real services and through the simulator.

Simulated engines behind etcd, monitor, migration service, scheduler and front end, all of them real
processes. vLLM's API server is left out: requests come in its messages from a load generator, since HTTP and
tokenizing would take what two cores have. The simulator gets the same requests, instances, policies and
parameters, and the delays of the control plane as they were measured in the live run. Engines are slowed down
so that the machine keeps up; a run in which it did not is not compared, but made again at half the speed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import Progress, TaskID

from benchmarks.live.compare import Row
from benchmarks.live.fleet import live_fleet
from benchmarks.live.scheduler_cost import SchedulerCost, cost_shape, scheduler_cost
from benchmarks.live.slices import Slice, Wish, available, take_slice
from benchmarks.live.tables import print_costs, print_rows
from benchmarks.live.tries import compare_trace
from benchmarks.report import RESULTS, machine, print_json, save
from simulator.workloads.base import WorkloadError

# Where `traces/` of the public data is.
DATA_VARIABLE: Final = "TAILRACE_DATA"
POLICIES: Final = ("pascal", "ares", "arrow", "cascade", "tailrace")


def _tell(progress: Progress, task: TaskID, done: int) -> None:
    progress.update(task, completed=done)


async def scheduler_costs(given: argparse.Namespace, console: Console) -> list[SchedulerCost]:
    """For each size of the fleet and each policy."""
    costs: list[SchedulerCost] = []
    for workers in given.cost_workers:
        async with live_fleet(cost_shape(workers)) as fleet:
            for policy in given.policies:
                with Progress(console=console, transient=True) as progress:
                    count = round(given.cost_rate * given.cost_seconds)
                    task = progress.add_task(f"scheduler, {workers} workers, {policy}", total=count)
                    costs.append(
                        await scheduler_cost(
                            fleet,
                            policy,
                            given.cost_rate,
                            given.cost_seconds,
                            given.cost_seconds / 2,
                            given.seed,
                            partial(_tell, progress, task),
                        )
                    )
    return costs


def _parse(arguments: Sequence[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        prog="make bench-live", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ["azure-code", "azure-conv", "mooncake", "burstgpt", "r1", "none"]
    parser.add_argument("--traces", nargs="+", choices=names, help="default: those that are there")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=60.0, help="of arrivals")
    parser.add_argument("--load", type=float, default=0.7, help="share of what the instances can do")
    parser.add_argument("--profile", default="llama-3.1-8b-h100")
    parser.add_argument("--speed", type=float, default=0.1, help="of the engines; less: slower, more exact")
    parser.add_argument("--tries", type=int, default=2, help="each at half the speed of the one before")
    parser.add_argument("--seats", type=int, default=8, help="most requests in a batch")
    parser.add_argument("--longest-output", type=int, default=700, help="tokens")
    parser.add_argument("--cost-workers", type=int, nargs="*", default=[16, 64])
    parser.add_argument("--cost-rate", type=float, default=40.0, help="placements a second")
    parser.add_argument("--cost-seconds", type=float, default=15.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="4 workers, 10 s of arrivals, no large fleet")
    parser.add_argument("--keep", action="store_true", help="add to the last results, other rows stay")
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    given = parser.parse_args(arguments)
    if given.quick:
        given.workers, given.seconds, given.longest_output, given.tries = 4, 10.0, 300, 1
        # None asked for are none.
        given.cost_workers, given.cost_seconds = [4] if given.cost_workers else [], 5.0
    return parser, given


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; 1 when a request was lost."""
    parser, given = _parse(arguments)
    # Told to end, it takes its fleet down first, as at Ctrl-C.
    signal.signal(signal.SIGTERM, _end)
    console = Console(stderr=True)
    folder = os.environ.get(DATA_VARIABLE)
    data = Path(folder) if folder else None
    there = available(data)
    traces = given.traces or there
    if "none" in traces:
        traces = []
    if missing := [name for name in traces if name not in there]:
        parser.error(f"not there: {', '.join(missing)}; set {DATA_VARIABLE} to the folder of the public data")
    wish = Wish(
        workers=given.workers,
        seconds=given.seconds,
        load=given.load,
        profile=given.profile,
        speed=given.speed,
        seats=given.seats,
        longest_output=given.longest_output,
        seed=given.seed,
    )
    try:
        # All of them first: a file that cannot be read is told before anything has run.
        for trace in traces:
            take_slice(trace, data, wish)
    except WorkloadError as error:
        parser.error(str(error))
    console.print(f"on {machine()}; data path without HTTP; seed {given.seed}")
    name = "live-quick" if given.quick else "live"
    slices: list[Slice] = []
    rows: list[Row] = []
    for trace in traces:
        compared = asyncio.run(compare_trace(trace, data, wish, given.policies, given.tries, console))
        slices += compared.slices
        rows += compared.rows
        # What comes after may take long, and fail.
        _save(name, given.keep, _figures(given, slices, rows, []))
    costs = asyncio.run(scheduler_costs(given, console)) if given.cost_workers else []
    figures = _figures(given, slices, rows, costs)
    path = _save(name, given.keep, figures)
    if given.output == "json":
        print_json(name, figures)
    else:
        # A file or a pipe has no width of its own.
        out = Console(width=None if sys.stdout.isatty() else 160)
        if rows:
            print_rows(rows, out)
        if costs:
            print_costs(costs, out)
    console.print(f"figures: {path}")
    return 1 if any(row.live.lost for row in rows) or any(cost.lost for cost in costs) else 0


def _end(number: int, _: object) -> None:
    # `timeout` signals twice: the second must not cut the clearing up short.
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def _save(name: str, keep: bool, figures: dict[str, object]) -> Path:
    return save(name, _merged(RESULTS / f"{name}.json", figures) if keep else figures)


def _figures(
    given: argparse.Namespace, slices: Sequence[Slice], rows: Sequence[Row], costs: Sequence[SchedulerCost]
) -> dict[str, object]:
    described = []
    for taken in slices:
        about = asdict(taken)
        about["requests"] = len(taken.requests)
        about["speed"] = taken.shape.speed
        described.append({**about, "output_tokens": taken.output_tokens})
    found = {
        "path": "front end without HTTP: vLLM's messages over ZMQ",
        "seed": given.seed,
        "slices": described,
        "rows": [row.as_dict() for row in rows],
        "scheduler": [asdict(cost) for cost in costs],
    }
    finite = _finite(found)
    assert isinstance(finite, dict)
    return finite


def _finite(value: object) -> object:
    """JSON knows no NaN."""
    match value:
        case float() if not math.isfinite(value):
            return None
        case dict():
            return {key: _finite(each) for key, each in value.items()}
        case list() | tuple():
            return [_finite(each) for each in value]
    return value


_KEYS: Final = {"slices": ("trace", "speed"), "rows": ("trace", "policy"), "scheduler": ("policy", "workers")}


def _merged(path: Path, figures: dict[str, object]) -> dict[str, object]:
    """The rows of the last results that this run has not made, and its own."""
    if not path.is_file():
        return figures
    last = json.loads(path.read_text())
    for name, keys in _KEYS.items():
        ours = figures[name]
        assert isinstance(ours, list)
        made = {tuple(row[key] for key in keys) for row in ours}
        kept = [row for row in last.get(name, []) if tuple(row.get(key) for key in keys) not in made]
        figures[name] = kept + ours
    return figures


if __name__ == "__main__":
    sys.exit(main())
