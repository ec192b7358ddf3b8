"""`make bench-overload`: how overload by one tenant, or by all, affects the requests that are served.

Two simulated engines, slowed down so that they and not this machine are the bottleneck, behind vLLM's Python
API server with tenant keys; requests arrive at random (Poisson), in an open loop.

1. One tenant sends at half of the engines' capacity, while another sends nothing, as much as its limit allows
   (evenly spaced, all admitted), or ten times as much (at random, with five seconds' worth saved up). The
   cases alternate, with the same arrivals of the first tenant. Reported are its TTFT, the ratio of its P99 to
   that of the second case, which is what a tenant within its limit costs others, and the CPU time of a
   refusal.
2. The same tenant while another without a limit sends sixty prompts at once, behind a front end without
   `--fair-backlog` and behind one with it.
3. The total load is three times the engines' capacity, with and without `tailrace set slo admit=`; reported
   are the TTFT of admitted requests and how soon the others were refused.

4. A tenant sends small requests, while another sends the largest of one kind, as often as it is allowed to
   (benchmarks/overload/largest.py). The engines are fast, so that only the front end counts. Reported are the
   ratio of the first one's P99 TTFT to that with nobody else, and the API server's largest resident memory.
   The other one has no limit on the number of its requests, unless `--large-per-minute` sets one.

The first part takes seven minutes, the fourth five, all of them sixteen (`--turns 3 --burst-turns 1`: ten).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.overload.cases import (
    FAST,
    SMALL_TOKENS,
    Isolation,
    LargeFigures,
    beside_a_burst,
    beside_another_tenant,
    beside_large_requests,
    overload_all,
)
from benchmarks.overload.figures import LoadFigures, at_random
from benchmarks.overload.front_end import (
    FAIR_BACKLOG_TOKENS,
    SPEED,
    make_keys,
    measure_capacity,
    run_behind_edge,
    run_front_end,
    start_cluster,
)
from tests.harness.report import machine, save


def main() -> int:
    """Run all parts; the exit status is 1 if a request failed otherwise than by a refusal."""
    parser = argparse.ArgumentParser(
        prog="make bench-overload", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default="1,2,3,4", help="comma-separated list; default: all")
    parser.add_argument("--seconds", type=float, default=20.0, help="duration of arrivals per case and turn")
    parser.add_argument("--turns", type=int, default=6, help="repetitions of the first part")
    parser.add_argument(
        "--factor", type=float, default=10.0, help="multiple of its limit that a tenant sends"
    )
    parser.add_argument("--burst-turns", type=int, default=2, help="repetitions of the second part")
    parser.add_argument("--admit", type=float, default=0.25, help="admission factor of the third part")
    parser.add_argument("--large-turns", type=int, default=3, help="repetitions of the fourth part")
    parser.add_argument("--large-seconds", type=float, default=8.0, help="the same per case and turn")
    parser.add_argument(
        "--large", default="", metavar="NAME,..", help="kinds of the fourth part, by a part of their names"
    )
    parser.add_argument(
        "--large-speed",
        type=float,
        default=FAST,
        help="engines of the fourth part: multiple of the speed of an H100 with an 8B model",
    )
    parser.add_argument(
        "--small-tokens",
        type=int,
        default=SMALL_TOKENS,
        help="tokens of the first tenant's prompts in the fourth part",
    )
    parser.add_argument(
        "--large-edge",
        action="store_true",
        help="the fourth part: vllm-rs behind an edge in place of the Python app",
    )
    parser.add_argument(
        "--large-per-minute",
        type=float,
        default=0.0,
        help="requests per minute of the fourth part's tenant, five seconds' worth saved up; 0: no limit",
    )
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    options = parser.parse_args()
    parts = set(options.parts.split(","))
    if not parts <= {"1", "2", "3", "4"}:
        parser.error("--parts takes 1, 2, 3 and 4, separated by commas")
    console = Console(stderr=options.output == "json", width=130)
    console.print(f"on {machine()}")
    isolation: Isolation | None = None
    bursts: list[LoadFigures] = []
    overload: list[LoadFigures] = []
    large: list[LargeFigures] = []
    capacity = 0.0
    if "4" in parts:
        with tempfile.TemporaryDirectory(prefix="tailrace-overload-") as name, ExitStack() as stack:
            folder = Path(name)
            console.print("starting fast engines", style="dim")
            file = folder / "keys.json"
            keys = make_keys(file, options.large_per_minute)
            cluster = stack.enter_context(start_cluster(folder, options.large_speed))
            run = run_behind_edge if options.large_edge else run_front_end
            front = stack.enter_context(run(cluster, folder, file, keys))
            asyncio.run(front.send("patient", at_random(2.0, 5.0, 99), options.small_tokens))  # warm up
            names = [kind for kind in options.large.split(",") if kind]
            large = asyncio.run(
                beside_large_requests(
                    front, names, options.small_tokens, options.large_seconds, options.large_turns, console
                )
            )
    with tempfile.TemporaryDirectory(prefix="tailrace-overload-") as name, ExitStack() as stack:
        if parts == {"4"}:
            return report(isolation, bursts, overload, large, capacity, options.output, console)
        folder = Path(name)
        console.print("starting", style="dim")
        file = folder / "keys.json"
        keys = make_keys(file)
        cluster = stack.enter_context(start_cluster(folder, SPEED))
        front = stack.enter_context(run_front_end(cluster, folder, file, keys))
        asyncio.run(front.send("patient", at_random(2.0, 5.0, 99)))  # warm up
        capacity = asyncio.run(measure_capacity(front))
        console.print(f"capacity: {capacity:.1f} requests/s", style="dim")
        if "1" in parts:
            isolation = asyncio.run(
                beside_another_tenant(
                    front, capacity, options.seconds, options.turns, options.factor, console
                )
            )
        if "2" in parts:
            fair_front = stack.enter_context(
                run_front_end(cluster, folder, file, keys, "--fair-backlog", str(FAIR_BACKLOG_TOKENS))
            )
            bursts = asyncio.run(
                beside_a_burst(front, fair_front, capacity, options.seconds, options.burst_turns, console)
            )
        if "3" in parts:
            overload = asyncio.run(
                overload_all(front, cluster, capacity, options.seconds, options.admit, console)
            )
    return report(isolation, bursts, overload, large, capacity, options.output, console)


def report(
    isolation: Isolation | None,
    bursts: Sequence[LoadFigures],
    overload: Sequence[LoadFigures],
    large: Sequence[LargeFigures],
    capacity: float,
    output: str,
    console: Console,
) -> int:
    """Print and save the figures; return the exit status."""
    if isolation is not None:
        _print("one tenant at half of capacity, and another one", isolation.own, console)
        _print("the other one", isolation.other, console)
        for ratio in isolation.ratios:
            console.print(str(ratio))
        console.print(f"CPU time of a refusal: {isolation.refusal_cpu_ms:.2f} ms")
    if bursts:
        _print("one tenant at half of capacity, and a burst of another", bursts, console)
    if overload:
        _print("all tenants", overload, console)
    if large:
        _print_large(large, console)
    figures: dict[str, object] = {
        "capacity_per_s": capacity,
        "tenants": None if isolation is None else asdict(isolation),
        "bursts": [asdict(load) for load in bursts],
        "overload": [asdict(load) for load in overload],
        "large": [asdict(one) for one in large],
    }
    path = save("overload", figures)
    if output == "json":
        print(json.dumps(figures))
    console.print(f"figures: {path}")
    tenants = [] if isolation is None else [*isolation.own, *isolation.other]
    failed = [load.failed for load in (*tenants, *bursts, *overload)] + [one.failed for one in large]
    return 1 if any(failed) else 0


def _print_large(large: Sequence[LargeFigures], console: Console) -> None:
    title = f"P99 TTFT of small requests beside large ones (alone: {large[0].alone_p99_s * 1e3:.0f} ms)"
    table = Table("kind", "largest allowed", "answers", title=title)
    for column in ("P99 ms", "ratio", "90% of resampled", "turns", "failed", "resident MiB"):
        table.add_column(column, justify="right")
    for one in large:
        ratio = one.ratio
        table.add_row(
            one.kind,
            f"{one.size:,} {one.unit}",
            ", ".join(f"{count} x {status or 'none'}" for status, count in sorted(one.statuses.items())),
            f"{one.p99_s * 1e3:.0f}",
            f"{ratio.ratio:.2f}",
            f"{ratio.low:.2f}-{ratio.high:.2f}",
            f"{ratio.turn_min:.2f}-{ratio.turn_max:.2f}",
            str(one.failed),
            f"{one.resident_mib:,.0f}",
        )
    console.print(table)


def _print(title: str, loads: Sequence[LoadFigures], console: Console) -> None:
    table = Table(title=title)
    columns = ("offered/s", "admitted", "refused", "failed", "TTFT P50 s", "P99 s", "relative", "429 P99 s")
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    for load in loads:
        table.add_row(
            load.case,
            f"{load.rate_per_s:.1f}",
            str(load.admitted),
            str(load.refused),
            str(load.failed),
            f"{load.ttft_p50_s:.3f}",
            f"{load.ttft_p99_s:.3f}",
            f"{load.ttft_p99_s / loads[0].ttft_p99_s:.2f}",
            f"{load.refused_p99_s:.3f}" if load.refused else "",
        )
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
