"""`make bench-control`: placements of a real scheduler while a large fleet reports to a real monitor.

etcd, monitor and scheduler are real processes. Synthetic workers, played by one process, report all their
requests at the interval of real ones and phase changes at once; synthetic front ends place requests through
the real placement client, at random times. Every placed request appears on its instance, generates tokens and
finishes there. A real migration service has ordered migrations carried out: the synthetic workers hand the
request over after a moment.

All of them share this machine: the row says what each process used, and by how much the reports were late.
The synthetic workers, which in a fleet have machines of their own, get only the CPU time that is left over.
The monitor runs at the priority of its systemd unit.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

import grpc
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.control.plane import ControlPlane, Load, WorkersEnded, control_plane
from benchmarks.control.population import MAX_TOKENS, PROMPT_TOKENS
from frontend_svc.placement import PlacementClient
from tailrace.service.channels import Channels
from tailrace.v1 import scheduler_pb2
from tests.harness.loadgen import percentile
from tests.harness.report import print_json, save, table_console
from tests.harness.usage import cpu_seconds, resident_bytes

POLICIES: Final = ("least_loaded", "tailrace", "pascal", "ares", "arrow", "cascade")
_FRONT_ENDS: Final = 4
_PARTS: Final = ("monitor", "scheduler", "migration", "etcd", "workers", "front ends")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of one policy. Times in seconds; `cpu`: cores used, `memory`: bytes resident, by process."""

    policy: str
    instances: int
    requests: int
    rate: float
    placements: int
    refused: int
    failed: int
    migrated_per_s: float
    placement_p50_s: float
    placement_p99_s: float
    decision_p50_s: float
    decision_p99_s: float
    # Age of the scheduler's newest report of each instance; at least up to the interval.
    report_age_p50_s: float
    report_age_max_s: float
    # By how much the synthetic workers were late, the largest P99 of a second.
    reports_late_s: float
    cpu: dict[str, float]
    memory: dict[str, int]


@dataclass(frozen=True, slots=True)
class Failure:
    """A policy that could not be measured, because the control plane did not keep up."""

    policy: str
    instances: int
    reason: str


async def measure(plane: ControlPlane, policy: str, seed: int) -> Outcome:
    """Place requests at random times for the load's duration."""
    load = plane.load
    await plane.set_policy(policy)
    await asyncio.sleep(2 * load.interval_s)
    generator = random.Random(seed)
    channels = Channels()
    clients = [PlacementClient(plane.members, channels) for _ in range(_FRONT_ENDS)]
    latencies: list[float] = []
    decisions: list[float] = []
    counts = {"refused": 0, "failed": 0}
    plane.figures.late_s, plane.figures.migrated = 0.0, 0

    async def place(number: int) -> None:
        request_id = f"{policy}-{number}"
        began_s = time.perf_counter()
        reply = await clients[number % _FRONT_ENDS].place(
            scheduler_pb2.PlaceRequest(
                request_id=request_id,
                frontend_id=f"frontend-{number % _FRONT_ENDS}",
                prompt_tokens=PROMPT_TOKENS,
                max_tokens=MAX_TOKENS,
            )
        )
        latencies.append(time.perf_counter() - began_s)
        if reply is None or reply.refusal:
            counts["failed" if reply is None else "refused"] += 1
            return
        decisions.append(reply.decided_us / 1e6)
        plane.placed(reply.instance_id, request_id)

    used = {name: cpu_seconds(pids) for name, pids in plane.pids.items()}
    began_s = time.monotonic()
    due_s, number = began_s, 0
    try:
        async with asyncio.TaskGroup() as tasks:
            while (due_s := due_s + generator.expovariate(load.rate)) < began_s + load.seconds:
                if (left_s := due_s - time.monotonic()) > 0:
                    await asyncio.sleep(left_s)
                tasks.create_task(place(number))
                number += 1
    finally:
        for client in clients:
            await client.close()
        await channels.close()
    took_s = time.monotonic() - began_s
    if plane.reading.done():
        # The workers have ended, and nothing was measured; raises.
        plane.reading.result()
    cpu = {name: (cpu_seconds(pids) - used[name]) / took_s for name, pids in plane.pids.items()}
    late_s, migrated = plane.figures.late_s, plane.figures.migrated
    ages = await plane.report_ages()
    return Outcome(
        policy=policy,
        instances=load.instances,
        requests=load.requests,
        rate=load.rate,
        placements=len(latencies),
        refused=counts["refused"],
        failed=counts["failed"],
        migrated_per_s=migrated / took_s,
        placement_p50_s=percentile(latencies, 0.5),
        placement_p99_s=percentile(latencies, 0.99),
        decision_p50_s=percentile(decisions, 0.5),
        decision_p99_s=percentile(decisions, 0.99),
        report_age_p50_s=percentile(ages, 0.5),
        report_age_max_s=max(ages),
        reports_late_s=late_s,
        cpu=cpu,
        memory={name: sum(map(resident_bytes, pids)) for name, pids in plane.pids.items()},
    )


async def measure_all(
    loads: Sequence[Load], policies: Sequence[str], seed: int, console: Console
) -> tuple[list[Outcome], list[Failure]]:
    """Measure every policy under every load."""
    outcomes: list[Outcome] = []
    failures: list[Failure] = []
    for load in loads:
        console.print(f"starting {load.instances} instances with {load.requests} requests each", style="dim")
        async with control_plane(load) as plane:
            for policy in policies:
                try:
                    outcomes.append(await measure(plane, policy, seed))
                except grpc.aio.AioRpcError as error:
                    failures.append(Failure(policy, load.instances, error.details() or error.code().name))
                    console.print(failures[-1], style="dim")
                except WorkersEnded as error:
                    failures.append(Failure(policy, load.instances, str(error)))
                    console.print(failures[-1], style="dim")
                    break
                except TimeoutError:
                    failures.append(Failure(policy, load.instances, "reports of all instances never arrived"))
                    console.print(failures[-1], style="dim")
                else:
                    console.print(outcomes[-1], style="dim")
    return outcomes, failures


def table(outcomes: Sequence[Outcome]) -> Table:
    """Return a table with a row per policy and size."""
    title = "Placements while a fleet reports (monitor: niceness 5; synthetic workers: idle class)"
    result = Table(title=title)
    for heading in ("instances", "requests", "per s"):
        result.add_column(heading, justify="right")
    result.add_column("policy", no_wrap=True)
    for heading in (
        "P50 ms",
        "P99 ms",
        "decision P99 ms",
        "not placed",
        "migrated per s",
        "report age max s",
        "reports late s",
    ):
        result.add_column(heading, justify="right")
    for name in _PARTS:
        result.add_column(f"{name} cores", justify="right")
    for o in outcomes:
        result.add_row(
            f"{o.instances}",
            f"{o.instances * o.requests}",
            f"{o.rate:g}",
            o.policy,
            f"{1e3 * o.placement_p50_s:.1f}",
            f"{1e3 * o.placement_p99_s:.1f}",
            f"{1e3 * o.decision_p99_s:.2f}",
            f"{o.refused + o.failed}",
            f"{o.migrated_per_s:.0f}",
            f"{o.report_age_max_s:.2f}",
            f"{o.reports_late_s:.2f}",
            *(f"{o.cpu[name]:.2f}" for name in _PARTS),
        )
    return result


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        prog="make bench-control",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--instances", type=int, nargs="+", default=[256, 1_024], metavar="N")
    parser.add_argument("--requests", type=int, default=100, help="on each instance")
    parser.add_argument("--rate", type=float, default=500.0, help="placements per second")
    parser.add_argument("--seconds", type=float, default=20.0, help="measured, for each policy")
    parser.add_argument("--interval", type=float, default=0.5, help="seconds between steady reports")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    options = parser.parse_args()
    console = Console(stderr=True)
    loads = [
        Load(instances, options.requests, options.rate, options.seconds, options.interval)
        for instances in options.instances
    ]
    outcomes, failures = uvloop.run(measure_all(loads, options.policies, options.seed, console))
    figures: dict[str, object] = {
        "rows": [asdict(outcome) for outcome in outcomes],
        "not_measured": [asdict(failure) for failure in failures],
    }
    path = save("control", figures)
    if options.output == "json":
        print_json("control", figures)
    else:
        printed = table_console(160)
        printed.print(table(outcomes))
        for failure in failures:
            printed.print(
                f"not measured: {failure.policy} with {failure.instances} instances: {failure.reason}"
            )
    console.print(f"saved to {path}")


if __name__ == "__main__":
    main()
