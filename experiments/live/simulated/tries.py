"""Run a slice under every policy, again at lower speed if the machine did not keep up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, TaskID

from experiments.live.simulated.compare import Row, compare
from experiments.live.simulated.fleet import live_fleet
from experiments.live.simulated.replay import replay
from experiments.live.simulated.simulation import has_pools
from experiments.live.simulated.slices import Slice, SliceSpec, take_slice
from experiments.live.simulated.tables import print_slice


@dataclass(slots=True)
class TraceComparison:
    """A trace's slices, one per speed that was needed, and one row per policy."""

    slices: list[Slice] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)


def halved_speeds(spec: SliceSpec, tries: int) -> list[SliceSpec]:
    """Return the specification at full speed, half the speed and so on: the same requests in twice the
    time."""
    return [replace(spec, speed=spec.speed / 2**n, seconds=spec.seconds * 2**n) for n in range(tries)]


async def compare_trace(
    trace: str, data: Path | None, spec: SliceSpec, policies: Sequence[str], tries: int, console: Console
) -> TraceComparison:
    """Compare all policies on a trace. Whether one is repeated depends only on the machine's delays, never on
    the figures.

    Raise WorkloadError, PartFailed or SimulationError if that fails.
    """
    compared = TraceComparison()
    remaining = list(policies)
    specs = halved_speeds(spec, tries)
    for each in specs:
        trace_slice = take_slice(trace, data, each)
        print_slice(trace_slice, console)
        compared.slices.append(trace_slice)
        rows = await _compare_slice(trace_slice, remaining, console)
        # A lost request is reported, however slow the machine was.
        done = [row for row in rows if row.live.machine.kept_up or row.live.lost or each is specs[-1]]
        compared.rows += done
        remaining = [row.policy for row in rows if row not in done]
        if not remaining:
            break
    return compared


async def _compare_slice(trace_slice: Slice, policies: Sequence[str], console: Console) -> list[Row]:
    """Run one policy after another on one fleet."""
    rows: list[Row] = []
    async with live_fleet(trace_slice.shape) as fleet:
        for policy in policies:
            await fleet.reset(policy, has_pools(policy))
            await fleet.wait_idle()
            with Progress(console=console, transient=True) as progress:
                task = progress.add_task(
                    f"{trace_slice.trace}, {policy}, live", total=len(trace_slice.requests)
                )
                live = await replay(
                    fleet, policy, trace_slice.requests, partial(update_progress, progress, task)
                )
            # Not during the replay, which needs the cores.
            row = compare(trace_slice, policy, live)
            rows.append(row)
            ratio = row.ratios["latency"].mean
            lost = f"{live.lost} lost ({live.lost_why})" if live.lost else "none lost"
            late = "" if live.machine.kept_up else "; the machine was too slow"
            console.print(
                f"  {policy}: {live.wall_s:.0f} s, {lost}, end to end {ratio:.2f} of simulated{late}",
                style="dim",
            )
    return rows


def update_progress(progress: Progress, task: TaskID, done: int) -> None:
    """Set the number of requests that have ended."""
    progress.update(task, completed=done)
