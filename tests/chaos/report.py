"""The results of a run, as JSON and as tables."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from typing import Final

import grpc
import msgspec
from rich.console import Console, RenderableType
from rich.table import Table

from tailrace.telemetry.tree import render_tree
from tailrace.v1 import admin_pb2
from tests.chaos.cluster import Cluster
from tests.chaos.invariants import FILES, MEMORY, TASKS, InvariantChecker
from tests.chaos.load import Load, Tally
from tests.chaos.reconnecting import ResumeHeader
from tests.chaos.schedule import Tier
from tests.chaos.timeline import Timeline
from tests.harness.loadgen import percentile

# How much of the timeline to print before and after the first violation.
_CONTEXT_S: Final = 30.0
_MAX_TRACES: Final = 3
_CALL_S: Final = 5.0
_NO_FAULT: Final = "nothing"


class Gaps(msgspec.Struct, frozen=True):
    """Longest gap of each complete stream, aggregated, in seconds."""

    streams: int
    p99_s: float
    longest_s: float


class Resumed(msgspec.Struct, frozen=True):
    """Streams whose clients reconnected, and their longest gaps, in seconds."""

    whole: int
    not_whole: int
    p99_s: float
    longest_s: float


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one run."""

    seed: int
    seconds: float
    # How often each kind was injected.
    faults: dict[str, int]
    # Number by ending.
    streams: dict[str, int]
    # Of these, the ones through the edge.
    through_edge: dict[str, int]
    tokens: int
    # Number of complete streams by the model version that generated them.
    versions: dict[str, int]
    # By the header that clients reconnect with; and how often a later request of the client had the answer.
    resumed: dict[str, Resumed]
    overtaken: int
    migrations: dict[str, int]
    corrupt_blocks_found: float
    # By the fault on the processes that served the stream.
    gaps: dict[str, Gaps]
    # Maximum over the processes of each tier when idle: before the first fault, and after.
    first: dict[str, dict[str, float]]
    worst: dict[str, dict[str, float]]
    # By process: the mean of its last tenth over that of its third tenth, if it ran long enough.
    memory_growth: dict[str, float]
    broken: list[str]


def collect_figures(
    seed: int,
    seconds: float,
    faults: dict[str, int],
    load: Load,
    migrations: dict[str, int],
    corrupt_blocks: float,
    invariants: InvariantChecker,
    timeline: Timeline,
) -> Figures:
    """Collect the figures of a run that has ended."""
    return Figures(
        seed=seed,
        seconds=round(seconds, 1),
        faults=_plain(dict(sorted(faults.items()))),
        streams=_plain(load.tally.endings),
        through_edge=_plain(load.tally.through_edge),
        tokens=load.tally.tokens,
        versions=_plain(load.tally.versions),
        resumed={header.value: _resumed(load.tally, header) for header in ResumeHeader},
        overtaken=load.tally.overtaken,
        migrations=migrations,
        corrupt_blocks_found=corrupt_blocks,
        gaps={
            fault or _NO_FAULT: Gaps(len(gaps), round(percentile(gaps, 0.99), 2), round(max(gaps), 2))
            for fault, gaps in sorted(load.tally.gaps.items())
        },
        first={tier.value: usage.baseline for tier, usage in invariants.usage.items()},
        worst={tier.value: usage.worst for tier, usage in invariants.usage.items()},
        memory_growth=_memory_growth(invariants),
        broken=[str(event) for event in timeline.violations],
    )


def _plain(counts: Mapping[str, int]) -> dict[str, int]:
    """Return the counts under plain strings: members of an enum print as `<Ending.WHOLE: 'whole'>`."""
    return {str(name): count for name, count in counts.items()}


def _resumed(tally: Tally, header: ResumeHeader) -> Resumed:
    gaps = tally.resumed[header] or [0.0]
    longest = round(max(gaps), 2)
    return Resumed(
        len(tally.resumed[header]), tally.not_resumed[header], round(percentile(gaps, 0.99), 2), longest
    )


def _memory_growth(invariants: InvariantChecker) -> dict[str, float]:
    found = {}
    for name, values in invariants.memory.items():
        tenth = len(values) // 10
        if tenth >= 2:
            early, late = values[2 * tenth : 3 * tenth], values[-tenth:]
            found[name] = round(sum(late) / sum(early), 3)
    return found


def print_figures(figures: Figures, console: Console) -> None:
    """Print the figures as tables."""
    count = sum(figures.faults.values())
    table = Table("fault", "times", title=f"{count} faults of seed {figures.seed} in {figures.seconds:.0f} s")
    for kind, times in figures.faults.items():
        table.add_row(kind, str(times))
    console.print(table)
    gaps = Table(
        "fault on its processes", "streams", "P99, s", "longest, s", title="longest gap of complete streams"
    )
    for fault, each in figures.gaps.items():
        gaps.add_row(fault, str(each.streams), f"{each.p99_s:.2f}", f"{each.longest_s:.2f}")
    console.print(gaps)
    usage = Table("tier", "tasks", "files", "memory, MB", title="maximum when idle (before the first fault)")
    for tier, worst in figures.worst.items():
        first = figures.first[tier]
        scales = ((TASKS, 1.0), (FILES, 1.0), (MEMORY, 1e6))
        cells = [f"{worst.get(n, 0.0) / by:.0f} ({first.get(n, 0.0) / by:.0f})" for n, by in scales]
        usage.add_row(tier, *cells)
    console.print(usage)
    if figures.memory_growth:
        growth = sorted(figures.memory_growth.values())
        console.print(
            f"memory over the run of a process: {growth[0]:.3f} to {growth[-1]:.3f} of the initial value"
        )
    console.print(
        f"streams: {_counted(figures.streams)}; {figures.tokens:,} tokens; "
        f"generated by {_counted(figures.versions)}"
    )
    console.print(f"of these through the edge: {_counted(figures.through_edge)}")
    for header, found in figures.resumed.items():
        console.print(
            f"reconnected by {header}: {found.whole} complete, {found.not_whole} not; "
            f"P99 of the longest gap {found.p99_s:.2f} s, longest {found.longest_s:.2f} s"
        )
    console.print(
        f"migrations: {_counted(figures.migrations)}; corrupt blocks found: {figures.corrupt_blocks_found:g}"
    )
    console.print(f"violations: {len(figures.broken)}", style="bold red" if figures.broken else "bold green")


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"


async def print_violations(cluster: Cluster, timeline: Timeline, console: Console) -> None:
    """Print the timeline around the first violation, and the traces of affected streams."""
    if not timeline.violations:
        return
    first = timeline.violations[0]
    console.print(f"\ntimeline from {_CONTEXT_S:.0f} s before the first violation:")
    for event in timeline.since(first.at_s - _CONTEXT_S):
        if event.at_s <= first.at_s + _CONTEXT_S:
            console.print(str(event), markup=False, highlight=False)
    names = [found[0] for event in timeline.violations if (found := re.search(r"chaos-\d+", event.text))]
    for name in list(dict.fromkeys(names))[:_MAX_TRACES]:
        console.print(f"\ntrace of {name}:")
        console.print(await _trace(cluster, name), markup=False, highlight=False)


async def _trace(cluster: Cluster, name: str) -> RenderableType:
    for scheduler in cluster.in_tier(Tier.SCHEDULER):
        channel, stub = cluster.admin_stub(scheduler)
        async with channel:
            with contextlib.suppress(grpc.aio.AioRpcError):
                reply = await stub.GetTrace(admin_pb2.GetTraceRequest(id=name), timeout=_CALL_S)
                if reply.traces_data:
                    return render_tree(reply.traces_data)
    return "no spans"
