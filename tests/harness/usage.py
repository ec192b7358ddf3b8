"""CPU time of process trees, and time stolen by the host, read from /proc."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_TICK = os.sysconf("SC_CLK_TCK")


def descendants(pid: int) -> list[int]:
    """Return the ID of a process and those of all its current descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
        except OSError:
            continue  # exited since the listing
        parent = int(stat.rpartition(")")[2].split()[1])
        children.setdefault(parent, []).append(int(entry.name))
    found, todo = [], [pid]
    while todo:
        current = todo.pop()
        found.append(current)
        todo.extend(children.get(current, ()))
    return found


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the user and system CPU seconds of these processes; those that have exited count as 0."""
    total = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += int(fields[11]) + int(fields[12])
    return total / _TICK


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process; 0 if it has exited."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def stolen_s() -> float:
    """Return the seconds since boot, over all cores, in which runnable work waited while the host ran
    something else."""
    # user nice system idle iowait irq softirq steal
    return int(Path("/proc/stat").read_text().split("\n", 1)[0].split()[8]) / _TICK
