"""Replay part of each trace through the real services and through the simulator.

Simulated engines run behind etcd, monitor, migration service, scheduler and front end, all of them real
processes. vLLM's API server is left out: a load generator sends its messages, since HTTP and tokenization
would use up two cores. The simulator gets the same requests, instances, policies and parameters, and the
control plane's delays as measured in the live run. Engines are slowed down so that the machine keeps up; a
run in which it did not is not compared, but repeated at half the speed.
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
from rich.progress import Progress

from experiments.live.simulated.compare import Row
from experiments.live.simulated.fleet import live_fleet
from experiments.live.simulated.scheduler_cost import SchedulerCost, cost_shape, scheduler_cost
from experiments.live.simulated.slices import Slice, SliceSpec, available_traces, take_slice
from experiments.live.simulated.tables import print_costs, print_rows
from experiments.live.simulated.tries import compare_trace, update_progress
from simulator.workloads.base import WorkloadError
from tests.harness.report import RESULTS, machine, print_json, save, table_console

# Names the folder of the public data, which contains `traces/`.
DATA_VARIABLE: Final = "TAILRACE_DATA"
POLICIES: Final = ("pascal", "ares", "arrow", "cascade", "tailrace")


async def scheduler_costs(options: argparse.Namespace, console: Console) -> list[SchedulerCost]:
    """Measure the scheduler's cost for each fleet size and policy."""
    costs: list[SchedulerCost] = []
    for workers in options.cost_workers:
        async with live_fleet(cost_shape(workers)) as fleet:
            for policy in options.policies:
                with Progress(console=console, transient=True) as progress:
                    count = round(options.cost_rate * options.cost_seconds)
                    task = progress.add_task(f"scheduler, {workers} workers, {policy}", total=count)
                    costs.append(
                        await scheduler_cost(
                            fleet,
                            policy,
                            options.cost_rate,
                            options.cost_seconds,
                            options.cost_seconds / 2,
                            options.seed,
                            partial(update_progress, progress, task),
                        )
                    )
    return costs


def _parse(arguments: Sequence[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.live.simulated",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = ["azure-code", "azure-conv", "mooncake", "burstgpt", "r1", "none"]
    parser.add_argument("--traces", nargs="+", choices=names, help="default: all available ones")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of arrivals")
    parser.add_argument("--load", type=float, default=0.7, help="share of the instances' capacity")
    parser.add_argument("--profile", default="llama-3.1-8b-h100")
    parser.add_argument(
        "--speed", type=float, default=0.1, help="of the engines; lower is slower and more accurate"
    )
    parser.add_argument(
        "--tries", type=int, default=2, help="attempts, each at half the speed of the previous one"
    )
    parser.add_argument("--seats", type=int, default=8, help="maximum requests in a batch")
    parser.add_argument("--longest-output", type=int, default=700, help="in tokens; longer ones are left out")
    parser.add_argument("--cost-workers", type=int, nargs="*", default=[16, 64])
    parser.add_argument("--cost-rate", type=float, default=40.0, help="placements per second")
    parser.add_argument("--cost-seconds", type=float, default=15.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="4 workers, 10 s of arrivals, no large fleet")
    parser.add_argument("--keep", action="store_true", help="add to the previous results, keeping other rows")
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    options = parser.parse_args(arguments)
    if options.quick:
        options.workers, options.seconds, options.longest_output, options.tries = 4, 10.0, 300, 1
        # An empty list stays empty.
        options.cost_workers, options.cost_seconds = [4] if options.cost_workers else [], 5.0
    return parser, options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 if a request was lost."""
    parser, options = _parse(arguments)
    # On SIGTERM, stop the fleet first, as on Ctrl-C.
    signal.signal(signal.SIGTERM, _exit_on_signal)
    console = Console(stderr=True)
    folder = os.environ.get(DATA_VARIABLE)
    data = Path(folder) if folder else None
    available = available_traces(data)
    traces = options.traces or available
    if "none" in traces:
        traces = []
    if missing := [name for name in traces if name not in available]:
        parser.error(f"missing: {', '.join(missing)}; set {DATA_VARIABLE} to the folder of the public data")
    spec = SliceSpec(
        workers=options.workers,
        seconds=options.seconds,
        load=options.load,
        profile=options.profile,
        speed=options.speed,
        seats=options.seats,
        longest_output=options.longest_output,
        seed=options.seed,
    )
    try:
        # Read all traces first, so that an unreadable file is reported before anything runs.
        for trace in traces:
            take_slice(trace, data, spec)
    except WorkloadError as error:
        parser.error(str(error))
    console.print(f"on {machine()}; data path without HTTP; seed {options.seed}")
    name = "live-quick" if options.quick else "live"
    slices: list[Slice] = []
    rows: list[Row] = []
    for trace in traces:
        compared = asyncio.run(compare_trace(trace, data, spec, options.policies, options.tries, console))
        slices += compared.slices
        rows += compared.rows
        # Save now: the rest may take long, and fail.
        _save(name, options.keep, _figures(options, slices, rows, []))
    costs = asyncio.run(scheduler_costs(options, console)) if options.cost_workers else []
    figures = _figures(options, slices, rows, costs)
    path = _save(name, options.keep, figures)
    if options.output == "json":
        print_json(name, figures)
    else:
        out = table_console(160)
        if rows:
            print_rows(rows, out)
        if costs:
            print_costs(costs, out)
    console.print(f"figures: {path}")
    return 1 if any(row.live.lost for row in rows) or any(cost.lost for cost in costs) else 0


def _exit_on_signal(number: int, _: object) -> None:
    # `timeout` sends the signal twice; the second must not interrupt the cleanup.
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def _save(name: str, keep: bool, figures: dict[str, object]) -> Path:
    return save(name, _merged(RESULTS / f"{name}.json", figures) if keep else figures)


def _figures(
    options: argparse.Namespace, slices: Sequence[Slice], rows: Sequence[Row], costs: Sequence[SchedulerCost]
) -> dict[str, object]:
    described = []
    for trace_slice in slices:
        about = asdict(trace_slice)
        about["requests"] = len(trace_slice.requests)
        about["speed"] = trace_slice.shape.speed
        described.append({**about, "output_tokens": trace_slice.output_tokens})
    found = {
        "path": "front end without HTTP: vLLM's messages over ZMQ",
        "seed": options.seed,
        "slices": described,
        "rows": [row.as_dict() for row in rows],
        "scheduler": [asdict(cost) for cost in costs],
    }
    finite = _finite(found)
    assert isinstance(finite, dict)
    return finite


def _finite(value: object) -> object:
    """Replace values that JSON does not have (NaN, infinity) by None."""
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
    """Add the rows of the previous results that this run has not replaced."""
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
