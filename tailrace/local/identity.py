"""Identify processes beyond their pids, so that a reused pid is never signalled. Linux only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec


class Identity(msgspec.Struct, frozen=True):
    """A unique process: its pid, its start time in clock ticks since boot, and the id of that boot."""

    pid: int
    start_ticks: int
    boot_id: str

    def alive(self) -> bool:
        """Return whether this very process is running; a zombie is not."""
        stat = _stat(self.pid)
        return (
            stat is not None
            and stat.start_ticks == self.start_ticks
            and stat.state not in "ZX"
            and self.boot_id == _boot_id()
        )

    def session_members(self) -> list[int]:
        """Return the pids of running processes in the session that this process leads or led.

        The kernel does not reuse a pid while a session has it as its id. So if another process has the pid
        now, the session is over, and any session with that id is another one.
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
    """Return the identity of a running process. Raise ProcessLookupError if there is none."""
    stat = _stat(pid)
    if stat is None:
        raise ProcessLookupError(pid)
    return Identity(pid, stat.start_ticks, _boot_id())


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _stat(pid: int) -> _Stat | None:
    """Read fields 3, 6 and 22 of /proc/<pid>/stat (proc_pid_stat(5)); return None if there is no process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name, in parentheses, may contain anything, so parse after the last parenthesis.
    fields = text.rpartition(")")[2].split()
    return _Stat(pid=pid, state=fields[0], session=int(fields[3]), start_ticks=int(fields[19]))


def _all_stats() -> Iterator[_Stat]:
    for name in os.listdir("/proc"):
        if name.isdigit() and (stat := _stat(int(name))) is not None:
            yield stat
