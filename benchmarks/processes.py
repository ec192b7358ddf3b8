"""CPU time of process trees, and what the host takes away, read from /proc."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_TICK = os.sysconf("SC_CLK_TCK")


def descendants(pid: int) -> list[int]:
    """pid and all processes below it, as of now."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
        except OSError:
            continue  # gone between listing and reading
        parent = int(stat.rpartition(")")[2].split()[1])
        children.setdefault(parent, []).append(int(entry.name))
    found, todo = [], [pid]
    while todo:
        current = todo.pop()
        found.append(current)
        todo.extend(children.get(current, ()))
    return found


def cpu_seconds(pids: Iterable[int]) -> float:
    """User and system CPU seconds that these processes have used; those gone count as 0."""
    total = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += int(fields[11]) + int(fields[12])
    return total / _TICK


def stolen_s() -> float:
    """Seconds since the start, over all cores, in which there was work and the host ran something else."""
    # user nice system idle iowait irq softirq steal
    return int(Path("/proc/stat").read_text().split("\n", 1)[0].split()[8]) / _TICK
