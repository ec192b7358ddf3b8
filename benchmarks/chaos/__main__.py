"""`make chaos`: a fault every few seconds, drawn by a seed, on a cluster of real services; nothing may break.

Each process has a network namespace of its own and certificates; etcd has three members. Faults that last go
on while the next ones come. After each, streams must have ended with the right text, and nothing may be held
or have leaked. Needs root, iproute2 and util-linux.
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

from benchmarks.chaos.answers import questions
from benchmarks.chaos.campaign import Campaign
from benchmarks.chaos.cluster import Cluster, Shape, open_cluster
from benchmarks.chaos.faults import Faults
from benchmarks.chaos.load import Load
from benchmarks.chaos.mover import Mover
from benchmarks.chaos.report import Figures, gather, show, show_breaches
from benchmarks.chaos.rollouts import Rollouts
from benchmarks.chaos.schedule import OF_SIMULATED, ROLLOUTS, RULES, Cast, Kind, Tier, Version, draw
from benchmarks.chaos.timeline import Timeline
from benchmarks.chaos.watch import CORRUPT, Watch
from benchmarks.etcd_faults.namespaces import NoNamespaces, inside, inside_command, prepare
from benchmarks.report import RESULTS, machine, save

UNSUPPORTED: Final = 3
"""Exit status where the machine does not let us make namespaces."""

_QUESTIONS: Final = 60
# Workers of the changed version, where there are rollouts.
_CHANGED: Final = 4
_LONGEST: Final = {"simulated": 120, "vllm": 200}
_POLICIES: Final = ("tailrace", "pascal", "ares", "arrow", "cascade", "least_loaded", "round_robin")
# They need programs in the kernel.
_DROPPING: Final = frozenset({Kind.DEAF, Kind.MUTE, Kind.ONE_WAY, Kind.LOSS})


@dataclass(frozen=True, slots=True)
class Options:
    """From the command line."""

    faults: int
    seed: int
    streams: int
    shape: Shape
    kinds: frozenset[Kind]
    output: str


async def campaign(options: Options, console: Console) -> Figures:
    """One run; its figures."""
    timeline = Timeline(
        lambda event: console.print(
            str(event), style="red" if event.broken else "dim", markup=False, highlight=False
        )
    )
    logs = RESULTS / f"chaos-{options.seed}-logs"
    with tempfile.TemporaryDirectory(prefix="tailrace-chaos-") as root:
        async with open_cluster(Path(root), options.shape, timeline, logs) as cluster:
            return await _run(options, cluster, timeline, console)


async def _run(options: Options, cluster: Cluster, timeline: Timeline, console: Console) -> Figures:
    asked = questions(options.seed, _QUESTIONS, _LONGEST[options.shape.engine])
    load = Load(cluster, asked, options.streams, timeline)
    rollouts = Rollouts(cluster, load, timeline)
    await load.learn(Version.FIRST)
    if options.shape.changed:
        await rollouts.learn()
        await rollouts.swap()
        await load.learn(Version.CHANGED)
        await rollouts.swap()
    mover, watch = Mover(cluster, options.seed), Watch(cluster)
    faults = Faults(cluster, load, mover, rollouts, timeline)
    run = Campaign(cluster, load, faults, watch, timeline)
    kinds = options.kinds - (frozenset() if cluster.drops_packets else _DROPPING)
    async with _running(mover.run()), _running(load.run()):
        # Everything once without faults: what there is then is what there may be.
        load.let_in()
        await load.flowing()
        await asyncio.sleep(3.0)
        load.keep_out()
        await load.ended()
        await watch.learn()
        timeline.note(f"{options.faults} faults of seed {options.seed}")
        began_s = timeline.now_s
        await run.run(list(draw(options.seed, options.faults, _cast(cluster), kinds)))
        took_s = timeline.now_s - began_s
        corrupt = watch.counted(CORRUPT)
    await show_breaches(cluster, timeline, console)
    return gather(options.seed, took_s, dict(run.done), load, dict(mover.outcomes), corrupt, watch, timeline)


def _cast(cluster: Cluster) -> Cast:
    names: dict[Tier, list[str]] = collections.defaultdict(list)
    for member in cluster.members.values():
        names[member.tier].append(member.name)
    names[Tier.ETCD] = [member.name for member in cluster.etcd.members]
    return Cast(names, _POLICIES)


@asynccontextmanager
async def _running(coroutine: Coroutine[None, None, None]) -> AsyncIterator[None]:
    task = asyncio.create_task(coroutine)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def read_options() -> Options:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--streams", type=int, default=30)
    parser.add_argument("--engine", choices=["simulated", "vllm"], default="simulated")
    parser.add_argument("--front", choices=["rust", "python"], default="rust")
    parser.add_argument("--speed", type=float, default=0.5, help="of simulated engines")
    kinds_by_name = {kind.name.lower(): kind for kind in RULES}
    parser.add_argument("--kind", nargs="+", choices=list(kinds_by_name), help="these alone")
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    given = parser.parse_args()
    kinds = frozenset(kinds_by_name[name] for name in given.kind or kinds_by_name)
    if given.engine != "simulated":
        kinds -= OF_SIMULATED
    changed = _CHANGED if kinds & ROLLOUTS else 0
    shape = Shape(given.engine, given.front, given.workers, given.speed, changed)
    return Options(given.faults, given.seed, given.streams, shape, kinds, given.output)


def main() -> int:
    """Inside namespaces of its own; exit status 1 when something broke."""
    options = read_options()
    if not inside():
        try:
            command = inside_command([sys.executable, "-m", "benchmarks.chaos", *sys.argv[1:]])
        except NoNamespaces as error:
            print(error, file=sys.stderr)
            return UNSUPPORTED
        os.execvp(command[0], command)
    prepare()
    logging.getLogger("grpc").setLevel(logging.CRITICAL)
    console = Console(stderr=options.output == "json", width=150)
    console.print(f"on {machine()}")
    figures = asyncio.run(campaign(options, console))
    show(figures, console)
    plain = msgspec.to_builtins(figures)
    if options.output == "json":
        print(json.dumps(plain))
    console.print(f"figures: {save(f'chaos-{options.seed}', plain)}")
    return int(bool(figures.broken))


if __name__ == "__main__":
    sys.exit(main())
