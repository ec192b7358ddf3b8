"""`make chaos`: inject a fault every few seconds, drawn from a seed, into a cluster of real services.

Each process has its own network namespace and certificate; etcd has three members. Faults with a duration
overlap with the next ones. After each fault, streams must have ended with the expected text, and nothing may
be left over or have leaked. Needs root, iproute2 and util-linux.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import logging
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console

from tests.chaos.answers import draw_questions
from tests.chaos.campaign import Campaign
from tests.chaos.cluster import Cluster, Shape, open_cluster
from tests.chaos.core_dumps import allow_core_dumps
from tests.chaos.faults import Faults
from tests.chaos.invariants import CORRUPT, InvariantChecker
from tests.chaos.load import Load
from tests.chaos.mover import Mover
from tests.chaos.report import Figures, collect_figures, print_figures, print_violations
from tests.chaos.rollouts import Rollouts
from tests.chaos.schedule import ROLLOUTS, RULES, SIMULATED_ONLY, Kind, Targets, Tier, Version, draw
from tests.chaos.timeline import Timeline
from tests.harness.bad_policies import BAD_POLICIES, HANGING, REFUSED
from tests.harness.namespaces import (
    UNSUPPORTED,
    NamespacesUnavailable,
    command_in_namespaces,
    is_inside,
    prepare,
)
from tests.harness.report import RESULTS, machine, save

_QUESTION_COUNT: Final = 60
# Workers that run the changed version, if there are rollouts.
_CHANGED_WORKERS: Final = 4
_MAX_ANSWER_TOKENS: Final = {"simulated": 120, "vllm": 200}
_POLICIES: Final = ("tailrace", "pascal", "ares", "arrow", "cascade", "least_loaded", "round_robin")
# A scheduler that restarts for one that hangs is unhealthy for longer than the others wait.
_WRONG_POLICIES: Final = tuple(sorted(BAD_POLICIES.keys() - REFUSED - HANGING))
# They need XDP programs.
_NEED_XDP: Final = frozenset({Kind.DEAF, Kind.MUTE, Kind.ONE_WAY, Kind.LOSS})


@dataclass(frozen=True, slots=True)
class Options:
    """Command-line options."""

    faults: int
    seed: int
    streams: int
    shape: Shape
    kinds: frozenset[Kind]
    output: str


async def run_campaign(options: Options, console: Console) -> Figures:
    """Run the faults once; return the figures."""
    timeline = Timeline(
        lambda event: console.print(
            str(event), style="red" if event.is_violation else "dim", markup=False, highlight=False
        )
    )
    logs = RESULTS / f"chaos-{options.seed}-logs"
    with tempfile.TemporaryDirectory(prefix="tailrace-chaos-") as root:
        async with open_cluster(Path(root), options.shape, timeline, logs) as cluster:
            return await _run(options, cluster, timeline, console)


async def _run(options: Options, cluster: Cluster, timeline: Timeline, console: Console) -> Figures:
    to_ask = draw_questions(options.seed, _QUESTION_COUNT, _MAX_ANSWER_TOKENS[options.shape.engine])
    load = Load(cluster, to_ask, options.streams, timeline)
    rollouts = Rollouts(cluster, load, timeline)
    await load.record_references(Version.FIRST)
    if options.shape.changed:
        await rollouts.read_fingerprints()
        await rollouts.swap()
        await load.record_references(Version.CHANGED)
        await rollouts.swap()
    mover, invariants = Mover(cluster, options.seed), InvariantChecker(cluster)
    faults = Faults(cluster, load, mover, rollouts, timeline)
    campaign = Campaign(cluster, load, faults, invariants, timeline)
    kinds = options.kinds - (frozenset() if cluster.drops_packets else _NEED_XDP)
    async with _background(mover.run()), _background(load.run()):
        # Load without faults first: it determines the baseline.
        load.resume()
        await load.wait_streaming()
        await asyncio.sleep(3.0)
        load.pause()
        await load.wait_drained()
        await invariants.record_baseline()
        timeline.note(f"{options.faults} faults of seed {options.seed}")
        began_s = timeline.now_s
        try:
            await campaign.run(list(draw(options.seed, options.faults, _targets(cluster), kinds)))
        except asyncio.CancelledError:
            # Ctrl-C: what has been measured until now is worth printing.
            task = asyncio.current_task()
            if task is None or task.uncancel():
                raise
            timeline.note("interrupted")
        took_s = timeline.now_s - began_s
        corrupt = invariants.counter_total(CORRUPT)
    await print_violations(cluster, timeline, console)
    return collect_figures(
        options.seed,
        took_s,
        dict(campaign.injected),
        load,
        dict(mover.outcomes),
        corrupt,
        invariants,
        timeline,
    )


def _targets(cluster: Cluster) -> Targets:
    names: dict[Tier, list[str]] = collections.defaultdict(list)
    for member in cluster.members.values():
        names[member.tier].append(member.name)
    names[Tier.ETCD] = [member.name for member in cluster.etcd.members]
    return Targets(names, _POLICIES, _WRONG_POLICIES)


@asynccontextmanager
async def _background(coroutine: Coroutine[None, None, None]) -> AsyncIterator[None]:
    task = asyncio.create_task(coroutine)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def read_options() -> Options:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--streams", type=int, default=30)
    parser.add_argument("--engine", choices=["simulated", "vllm"], default="simulated")
    parser.add_argument("--front", choices=["rust", "python"], default="rust")
    parser.add_argument(
        "--speed", type=float, default=0.5, help="of simulated engines, 1: that of the profile"
    )
    kinds_by_name = {kind.name.lower(): kind for kind in RULES}
    parser.add_argument("--kind", nargs="+", choices=list(kinds_by_name), help="inject only these kinds")
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    given = parser.parse_args()
    kinds = frozenset(kinds_by_name[name] for name in given.kind or kinds_by_name)
    if given.engine != "simulated":
        kinds -= SIMULATED_ONLY
    changed = _CHANGED_WORKERS if kinds & ROLLOUTS else 0
    shape = Shape(given.engine, given.front, given.workers, given.speed, changed)
    return Options(given.faults, given.seed, given.streams, shape, kinds, given.output)


def main() -> int:
    """Run inside new namespaces; return exit status 1 if an invariant was violated."""
    options = read_options()
    if not is_inside():
        try:
            command = command_in_namespaces([sys.executable, "-m", "tests.chaos", *sys.argv[1:]])
        except NamespacesUnavailable as error:
            print(error, file=sys.stderr)
            return UNSUPPORTED
        os.execvp(command[0], command)
    prepare()
    allow_core_dumps()
    logging.getLogger("grpc").setLevel(logging.CRITICAL)
    console = Console(stderr=options.output == "json", width=150)
    console.print(f"on {machine()}")
    figures = asyncio.run(run_campaign(options, console))
    print_figures(figures, console)
    plain = msgspec.to_builtins(figures)
    if options.output == "json":
        print(json.dumps(plain))
    console.print(f"figures: {save(f'chaos-{options.seed}', plain)}")
    injected = sum(figures.faults.values())
    if injected < options.faults:
        console.print(f"interrupted: {injected} of {options.faults} faults were injected", style="red")
    return int(bool(figures.broken) or injected < options.faults)


if __name__ == "__main__":
    sys.exit(main())
