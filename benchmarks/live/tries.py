"""A slice under every policy, slower again where the machine did not keep up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, TaskID

from benchmarks.live.compare import Row, compare
from benchmarks.live.fleet import live_fleet
from benchmarks.live.replay import replay
from benchmarks.live.simulated import has_pools
from benchmarks.live.slices import Slice, Wish, take_slice
from benchmarks.live.tables import print_slice


@dataclass(slots=True)
class Compared:
    """A trace's slices, one for each speed that was needed, and one row a policy."""

    slices: list[Slice] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)


def slower(wish: Wish, tries: int) -> list[Wish]:
    """The wish, and the same at half the speed and so on: as many requests in twice the time."""
    return [replace(wish, speed=wish.speed / 2**n, seconds=wish.seconds * 2**n) for n in range(tries)]


async def compare_trace(
    trace: str, data: Path | None, wish: Wish, policies: Sequence[str], tries: int, console: Console
) -> Compared:
    """Whether a policy is tried again is decided by how late the machine was, never by the figures.

    Raises WorkloadError, PartFailed, SimulationError.
    """
    compared = Compared()
    left = list(policies)
    wishes = slower(wish, tries)
    for each in wishes:
        taken = take_slice(trace, data, each)
        print_slice(taken, console)
        compared.slices.append(taken)
        rows = await _compare_slice(taken, left, console)
        # A lost request is told, however slow the machine was.
        done = [row for row in rows if row.live.machine.kept_up or row.live.lost or each is wishes[-1]]
        compared.rows += done
        left = [row.policy for row in rows if row not in done]
        if not left:
            break
    return compared


async def _compare_slice(taken: Slice, policies: Sequence[str], console: Console) -> list[Row]:
    """One fleet, one policy after the other."""
    rows: list[Row] = []
    async with live_fleet(taken.shape) as fleet:
        for policy in policies:
            await fleet.set_policy(policy, has_pools(policy))
            await fleet.settled()
            with Progress(console=console, transient=True) as progress:
                task = progress.add_task(f"{taken.trace}, {policy}, live", total=len(taken.requests))
                live = await replay(fleet, policy, taken.requests, partial(_tell, progress, task))
            # Not beside the replay: the cores are wanted there.
            row = compare(taken, policy, live)
            rows.append(row)
            ratio = row.ratios["latency"].mean
            lost = f"{live.lost} lost ({live.lost_why})" if live.lost else "none lost"
            late = "" if live.machine.kept_up else "; the machine was too slow"
            console.print(
                f"  {policy}: {live.wall_s:.0f} s, {lost}, end to end {ratio:.2f} of simulated{late}",
                style="dim",
            )
    return rows


def _tell(progress: Progress, task: TaskID, done: int) -> None:
    progress.update(task, completed=done)
