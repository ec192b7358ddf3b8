"""Which process a pid names, so that a stranger who got the number later is never signalled. Linux."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec


class Identity(msgspec.Struct, frozen=True):
    """A process for all time: its pid, when it started (clock ticks since boot), and which boot that was."""

    pid: int
    start_ticks: int
    boot_id: str

    def alive(self) -> bool:
        """The very process runs (a zombie does not)."""
        stat = _stat(self.pid)
        return (
            stat is not None
            and stat.start_ticks == self.start_ticks
            and stat.state not in "ZX"
            and self.boot_id == _boot_id()
        )

    def session_members(self) -> list[int]:
        """Pids of the living processes of the session that this process leads or led.

        The kernel gives a pid to nobody else while a session bears it. So if another process has the pid now,
        the session is over and what bears the number is a stranger's.
        """
        if self.boot_id != _boot_id():
            return []
        leader = _stat(self.pid)
        if leader is not None and leader.start_ticks != self.start_ticks:
            return []
        return [stat.pid for stat in _all_stats() if stat.session == self.pid and stat.state not in "ZX"]


class _Stat(msgspec.Struct, frozen=True):
    pid: int
    state: str
    session: int
    start_ticks: int


def identify(pid: int) -> Identity:
    """The identity of a running process. Raises ProcessLookupError when there is none."""
    stat = _stat(pid)
    if stat is None:
        raise ProcessLookupError(pid)
    return Identity(pid, stat.start_ticks, _boot_id())


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _stat(pid: int) -> _Stat | None:
    """Fields 3, 6 and 22 of /proc/<pid>/stat (proc_pid_stat(5)), or None when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name, in parentheses, may hold anything; what follows the last one is regular.
    fields = text.rpartition(")")[2].split()
    return _Stat(pid=pid, state=fields[0], session=int(fields[3]), start_ticks=int(fields[19]))


def _all_stats() -> Iterator[_Stat]:
    for name in os.listdir("/proc"):
        if name.isdigit() and (stat := _stat(int(name))) is not None:
            yield stat
