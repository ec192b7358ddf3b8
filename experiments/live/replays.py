"""Record live runs under each of the five policies, and replay them.

Simulated engines run behind the real services, as in `experiments.live.simulated`. Each run is recorded, then
replayed with the policy that decided (every decision must be the same) and, as shadows on the same state,
with the other four.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

import grpc
import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.live.simulated.fleet import LiveFleet, live_fleet
from experiments.live.simulated.shape import FleetShape
from experiments.live.simulated.simulation import has_pools
from simulator.workloads.arrivals import poisson_requests
from simulator.workloads.lengths import Lengths, lognormal, tokens
from tailrace.control.recording import decode
from tailrace.control.replay import Replay
from tailrace.control.shadow import Comparison, Shadow, Verdict
from tailrace.records import PolicyRecord
from tailrace.v1 import admin_pb2
from tests.harness.report import save

POLICIES: Final = ("pascal", "ares", "arrow", "cascade", "tailrace")
_MARGIN_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Run:
    """Figures of one policy. `others`: number of different decisions by other policies."""

    policy: str
    seconds: float
    lines: int
    bytes: int
    decisions: dict[str, int]
    with_actions: dict[str, int]
    different: int
    others: dict[str, int]


def shape(workers: int) -> FleetShape:
    """Return a fleet with little KV, so that policies must act."""
    return FleetShape(
        workers=workers,
        profile="llama-3.1-8b-h100",
        speed=0.25,
        seats=16,
        kv_blocks=512,
        max_tokens=2_048,
        reasons=True,
        prefill_instances=max(1, workers // 4),
    )


def _lengths(count: int, rng: np.random.Generator) -> Lengths:
    return Lengths(
        tokens(lognormal(150, 900, count, rng)),
        tokens(lognormal(80, 600, count, rng)),
        tokens(lognormal(80, 500, count, rng)),
    )


async def _record(fleet: LiveFleet, seconds: float, lines: list[bytes]) -> None:
    request = admin_pb2.RecordRequest(seconds=seconds)
    async for reply in fleet.admin.Record(request, timeout=seconds + _MARGIN_S):
        lines += reply.lines


async def record_run(fleet: LiveFleet, policy: str, rate: float, seconds: float, seed: int) -> list[bytes]:
    """Run a load and record it, from when a third of the requests have arrived."""
    await fleet.reset(policy, has_pools(policy))
    await fleet.wait_idle()
    requests = poisson_requests("r", _lengths, round(rate * seconds), rate, seed)
    load = asyncio.create_task(
        fleet.load.replay(f"{policy}-", requests, _MARGIN_S / fleet.shape.speed, lambda done: None)
    )
    lines: list[bytes] = []
    try:
        # Waits for time, not for a condition: a third of the arrivals.
        await asyncio.sleep(seconds / 3)
        await _record(fleet, seconds, lines)
    finally:
        await load
    return lines


def replay_run(policy: str, lines: Sequence[bytes]) -> Run:
    """Replay with the same policy, and with the others as shadows."""
    run = Replay(decode(lines), lambda _: None)
    others: Counter[str] = Counter()

    def shadow(name: str) -> Shadow:
        def count(compared: Comparison) -> None:
            others[name] += compared.verdict is not Verdict.SAME

        return Shadow(PolicyRecord(name=name), run.control.active.slo, count)

    for name in POLICIES:
        if name != policy:
            run.watch(shadow(name))
    run.run()
    return Run(
        policy,
        run.seconds,
        len(lines),
        sum(map(len, lines)),
        dict(run.decisions),
        dict(run.acting),
        run.different.total(),
        dict(others),
    )


async def _run_all(options: argparse.Namespace, console: Console) -> list[Run]:
    runs: list[Run] = []
    async with live_fleet(shape(options.workers)) as fleet:
        for policy in options.policies:
            console.print(f"{policy} ...")
            lines = await record_run(fleet, policy, options.rate, options.seconds, options.seed)
            runs.append(replay_run(policy, lines))
    return runs


def _table(runs: Sequence[Run]) -> Table:
    table = Table(box=None)
    headings = ("policy", "seconds", "MB", "decisions", "with actions", "different", *POLICIES)
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    for run in runs:
        total = sum(run.decisions.values())
        others = ("-" if name == run.policy else str(run.others.get(name, 0)) for name in POLICIES)
        figures = (total, sum(run.with_actions.values()), run.different)
        size = f"{run.bytes / 1e6:.1f}"
        table.add_row(run.policy, f"{run.seconds:.0f}", size, *map(str, figures), *others)
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 if a decision differs in the replay."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.live.replays",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--rate", type=float, default=12.0, help="requests per second")
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="duration of arrivals, and of the recording"
    )
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    console = Console(stderr=True)
    try:
        runs = asyncio.run(_run_all(options, console))
    except grpc.aio.AioRpcError as error:
        console.print(f"{error.code().name}: {error.details()}")
        return 1
    path = save("replays", {"given": vars(options), "runs": [asdict(run) for run in runs]})
    Console(width=160).print(_table(runs))
    console.print(f"figures: {path}")
    return 1 if any(run.different for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
