"""A fleet that follows `tailrace_desired_instances` for a day, against fixed ones, in the simulator.

The day is the hour of the Azure conversation trace of 2023, its own rate and lengths stretched in time:
within each minute of it, arrivals are Poisson at the rate of the recorded minute, brought to a mean of
--rate, and lengths are drawn from its requests. It has the hour's shape, not that of a recorded day.

An instance takes --startup seconds to come, and migrates its requests away when it goes. Fixed fleets: as
many instances as the following one had at most, and as many as it had on average, rounded up.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from experiments.desired_instances.following import POLL_S, SAMPLE_S
from experiments.desired_instances.measure import TRACE, Settings, run
from experiments.desired_instances.plot import plot
from simulator.parallel import Task, run_tasks
from tailrace.scaling import Scaling
from tests.harness.report import print_json, save

_SERIES: Final = ("samples", "rates", "met")


def main() -> None:
    """Simulate the fleets; print and save the figures, and draw them."""
    parser = argparse.ArgumentParser(prog="python -m experiments.desired_instances", description=__doc__)
    parser.add_argument("--data", type=Path, default=os.environ.get("TAILRACE_DATA"), help="has traces/")
    parser.add_argument("--profile", default="llama-3.1-70b-tp2-h20")
    parser.add_argument("--policy", default="least_loaded")
    parser.add_argument("--rate", type=float, default=2.5, help="mean requests per second")
    parser.add_argument("--hours", type=float, default=24.0, help="to which the hour is stretched")
    parser.add_argument("--startup", type=float, default=120.0, help="seconds that an instance takes to come")
    parser.add_argument("--ttft", type=float, default=5.0)
    parser.add_argument("--tpot", type=float, default=0.15)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--most", type=int, default=12, help="instances that there may be")
    parser.add_argument("--unprofiled", action="store_true", help="also follow without a profile")
    parser.add_argument("--plot", type=Path, help="write an SVG")
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    options = parser.parse_args()
    if options.data is None:
        parser.error("the public data is missing: set --data or TAILRACE_DATA to the folder with traces/")
    settings = Settings(
        options.data,
        options.profile,
        options.policy,
        options.rate,
        options.hours,
        options.startup,
        options.ttft,
        options.tpot,
        options.seed,
        options.most,
    )
    followed = {"follows": run(settings, None)}
    if options.unprofiled:
        followed["follows, not profiled"] = run(settings, None, profiled=False)
    first = followed["follows"]
    mean = -int(-first.instance_hours // settings.hours)
    fixed = {
        f"fixed at its maximum, {first.most_instances}": first.most_instances,
        f"fixed at its mean, {mean}": mean,
    }
    outcomes = {
        **followed,
        **run_tasks([Task(name, run, (settings, count)) for name, count in fixed.items()]),
    }
    scaling = asdict(Scaling(most=settings.most))
    figures: dict[str, object] = {
        "settings": {**asdict(settings), "data": str(TRACE), "sample_s": SAMPLE_S, "poll_s": POLL_S},
        "scaling": scaling,
        "fleets": {
            name: {
                key: value for key, value in asdict(outcome).items() if key not in ("samples", "rates", "met")
            }
            for name, outcome in outcomes.items()
        },
    }
    path = save("desired_instances", figures)
    if options.plot is not None:
        met = {name: outcome.met for name, outcome in outcomes.items()}
        options.plot.write_text(plot(first.rates, first.samples, met, settings.day_s))
    if options.output == "json":
        print_json("desired_instances", figures)
        return
    table = Table(
        "fleet", "in SLO %", "TTFT P50 / P99 s", "TPOT P99 ms", "instance-hours", "most", "changes", "moves"
    )
    for name, outcome in outcomes.items():
        table.add_row(
            name,
            f"{100 * outcome.attainment:.2f}",
            f"{outcome.ttft_p50_s:.2f} / {outcome.ttft_p99_s:.2f}",
            f"{1e3 * outcome.tpot_p99_s:.0f}",
            f"{outcome.instance_hours:.1f}",
            str(outcome.most_instances),
            str(outcome.changes),
            str(outcome.migrations),
        )
    console = Console()
    console.print(
        f"{first.requests} requests of Azure conversation, {options.hours:g} h, {options.profile}, "
        f"{options.policy}, {settings.slo.describe()}, start-up {options.startup:g} s, {scaling}"
    )
    console.print(table)
    console.print(f"figures: {path}; {sum(o.cpu_s for o in outcomes.values()):.0f} CPU seconds")


if __name__ == "__main__":
    main()
