"""What a run found, as figures and for readers."""

from __future__ import annotations

import contextlib
import re
from typing import Final

import grpc
import msgspec
from rich.console import Console, RenderableType
from rich.table import Table

from benchmarks.chaos.cluster import Cluster
from benchmarks.chaos.load import Load, Tally
from benchmarks.chaos.returning import Way
from benchmarks.chaos.schedule import Tier
from benchmarks.chaos.timeline import Timeline
from benchmarks.chaos.watch import FILES, MEMORY, TASKS, Watch
from benchmarks.loadgen import percentile
from tailrace.telemetry.tree import render_tree
from tailrace.v1 import admin_pb2

# What a reader of a failed run sees: so long before the first breach, and after it.
_AROUND_S: Final = 30.0
_TRACES: Final = 3
_CALL_S: Final = 5.0
_NOTHING: Final = "nothing"


class Gaps(msgspec.Struct, frozen=True):
    """Longest gap of each of so many whole streams, in seconds."""

    streams: int
    p99_s: float
    longest_s: float


class Resumed(msgspec.Struct, frozen=True):
    """Streams whose clients came back for the rest, and their longest gaps, in seconds."""

    whole: int
    not_whole: int
    p99_s: float
    longest_s: float


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Of one run."""

    seed: int
    seconds: float
    # How often each kind came.
    faults: dict[str, int]
    # By how they ended.
    streams: dict[str, int]
    tokens: int
    # Whole ones, by the version of the model that made them.
    versions: dict[str, int]
    # By what clients came back; and how often one was told that a later request of it has the answer.
    resumed: dict[str, Resumed]
    overtaken: int
    migrations: dict[str, int]
    corrupt_blocks_found: float
    # By what was done to whoever had the stream.
    gaps: dict[str, Gaps]
    # The most that a process of each tier had when nothing was under way: before the first fault, and after.
    first: dict[str, dict[str, float]]
    worst: dict[str, dict[str, float]]
    # Of each run of a process that was long enough: the mean of its last tenth over that of its third.
    memory_growth: dict[str, float]
    broken: list[str]


def gather(
    seed: int,
    seconds: float,
    faults: dict[str, int],
    load: Load,
    migrations: dict[str, int],
    corrupt_blocks: float,
    watch: Watch,
    timeline: Timeline,
) -> Figures:
    """Of a run that has come to its end."""
    return Figures(
        seed=seed,
        seconds=round(seconds, 1),
        faults=dict(sorted(faults.items())),
        streams=dict(load.tally.endings),
        tokens=load.tally.tokens,
        versions=dict(load.tally.versions),
        resumed={way.value: _resumed(load.tally, way) for way in Way},
        overtaken=load.tally.overtaken,
        migrations=migrations,
        corrupt_blocks_found=corrupt_blocks,
        gaps={
            what or _NOTHING: Gaps(len(gaps), round(percentile(gaps, 0.99), 2), round(max(gaps), 2))
            for what, gaps in sorted(load.tally.gaps.items())
        },
        first={tier.value: seen.first for tier, seen in watch.seen.items()},
        worst={tier.value: seen.worst for tier, seen in watch.seen.items()},
        memory_growth=_growth(watch),
        broken=[str(event) for event in timeline.breaches],
    )


def _resumed(tally: Tally, way: Way) -> Resumed:
    gaps = tally.resumed[way] or [0.0]
    longest = round(max(gaps), 2)
    return Resumed(len(tally.resumed[way]), tally.not_resumed[way], round(percentile(gaps, 0.99), 2), longest)


def _growth(watch: Watch) -> dict[str, float]:
    found = {}
    for name, values in watch.memory.items():
        tenth = len(values) // 10
        if tenth >= 2:
            early, late = values[2 * tenth : 3 * tenth], values[-tenth:]
            found[name] = round(sum(late) / sum(early), 3)
    return found


def show(figures: Figures, console: Console) -> None:
    """As tables."""
    count = sum(figures.faults.values())
    table = Table("fault", "times", title=f"{count} faults of seed {figures.seed} in {figures.seconds:.0f} s")
    for kind, times in figures.faults.items():
        table.add_row(kind, str(times))
    console.print(table)
    gaps = Table(
        "done to whoever had it", "streams", "P99, s", "longest, s", title="longest gap of whole streams"
    )
    for what, each in figures.gaps.items():
        gaps.add_row(what, str(each.streams), f"{each.p99_s:.2f}", f"{each.longest_s:.2f}")
    console.print(gaps)
    kept = Table(
        "tier", "tasks", "files", "memory, MB", title="most when nothing was under way (before faults)"
    )
    for tier, worst in figures.worst.items():
        first = figures.first[tier]
        scales = ((TASKS, 1.0), (FILES, 1.0), (MEMORY, 1e6))
        cells = [f"{worst.get(n, 0.0) / by:.0f} ({first.get(n, 0.0) / by:.0f})" for n, by in scales]
        kept.add_row(tier, *cells)
    console.print(kept)
    if figures.memory_growth:
        growth = sorted(figures.memory_growth.values())
        console.print(f"memory over a run of a process: {growth[0]:.3f} to {growth[-1]:.3f} of what it was")
    console.print(f"streams: {figures.streams}; {figures.tokens:,} tokens; made by {figures.versions}")
    for way, found in figures.resumed.items():
        console.print(
            f"came back by {way}: {found.whole} whole, {found.not_whole} not; "
            f"P99 of the longest gap {found.p99_s:.2f} s, longest {found.longest_s:.2f} s"
        )
    console.print(f"migrations: {figures.migrations}; corrupt blocks found: {figures.corrupt_blocks_found:g}")
    console.print(f"broken: {len(figures.broken)}", style="bold red" if figures.broken else "bold green")


async def show_breaches(cluster: Cluster, timeline: Timeline, console: Console) -> None:
    """A timeline around the first, and the traces of streams that went wrong."""
    if not timeline.breaches:
        return
    first = timeline.breaches[0]
    console.print(f"\ntimeline from {_AROUND_S:.0f} s before the first breach:")
    for event in timeline.since(first.at_s - _AROUND_S):
        if event.at_s <= first.at_s + _AROUND_S:
            console.print(str(event), markup=False, highlight=False)
    names = [found[0] for event in timeline.breaches if (found := re.search(r"chaos-\d+", event.text))]
    for name in list(dict.fromkeys(names))[:_TRACES]:
        console.print(f"\ntrace of {name}:")
        console.print(await _trace(cluster, name), markup=False, highlight=False)


async def _trace(cluster: Cluster, name: str) -> RenderableType:
    for scheduler in cluster.of(Tier.SCHEDULER):
        channel, stub = cluster.admin_stub(scheduler)
        async with channel:
            with contextlib.suppress(grpc.aio.AioRpcError):
                reply = await stub.GetTrace(admin_pb2.GetTraceRequest(id=name), timeout=_CALL_S)
                if reply.traces_data:
                    return render_tree(reply.traces_data)
    return "no spans"
