"""Run tests within limits that do not depend on how busy the machine is.

A mutant may compute forever, or wait forever. Wall time does not tell either from tests that rarely get a
core. The limits here are CPU time, and a period in which the tests neither ran nor waited for a core.
"""

from __future__ import annotations

import enum
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

_POLL_S: Final = 0.1
_NS: Final = 1e-9
_HAS_EXITED: Final = os.WEXITED | os.WNOHANG | os.WNOWAIT
# Tests that poll for something which never comes use a few percent of a core.
_IDLE_SHARE: Final = 0.1
# What the tests print after a failure is a few kilobytes.
_OUTPUT_BYTES: Final = 10_000


class End(enum.Enum):
    """How a run ended: by itself, because it computed for too long, or because it did nothing."""

    EXITED = "exited"
    CPU_LIMIT = "CPU limit"
    IDLE = "idle"


@dataclass(frozen=True, slots=True)
class Limits:
    """CPU seconds of all processes, and seconds without progress."""

    cpu_s: float
    idle_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Run:
    """A run that has ended. `output`: the end of what it wrote."""

    end: End
    status: int
    cpu_s: float
    output: str


@dataclass(frozen=True, slots=True)
class Usage:
    """What the processes of a run have used so far: seconds on a core, and seconds of waiting for one."""

    cpu_s: float
    queued_s: float


class Progress:
    """Decide whether a run is to be ended. Pure."""

    def __init__(self, limits: Limits, now_s: float) -> None:
        self._limits = limits
        self._since_s = now_s
        self._before = Usage(0.0, 0.0)

    def observe(self, now_s: float, usage: Usage) -> End | None:
        """Return why the run is to be ended, or None."""
        if usage.cpu_s > self._limits.cpu_s:
            return End.CPU_LIMIT
        passed_s = now_s - self._since_s
        if passed_s < self._limits.idle_s:
            return None
        # The queueing time of threads that have ended is not known any more.
        queued_s = max(0.0, usage.queued_s - self._before.queued_s)
        active_s = usage.cpu_s - self._before.cpu_s + queued_s
        self._since_s, self._before = now_s, usage
        return End.IDLE if active_s < _IDLE_SHARE * passed_s else None


def run_limited(command: Sequence[str], folder: Path, env: Mapping[str, str], limits: Limits) -> Run:
    """Run a command in a session of its own, which is killed when a limit is reached. Raise OSError."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        end, cpu_s = _watch(process, limits)
        output.seek(max(0, output.seek(0, os.SEEK_END) - _OUTPUT_BYTES))
        return Run(end, process.returncode, cpu_s, output.read().decode(errors="replace"))


def _watch(process: subprocess.Popen[bytes], limits: Limits) -> tuple[End, float]:
    """Wait for the end of the process; return how it ended, and the CPU seconds that it used."""
    progress = Progress(limits, time.monotonic())
    found: End | None = None
    try:
        while found is None and os.waitid(os.P_PID, process.pid, _HAS_EXITED) is None:
            found = progress.observe(time.monotonic(), usage_of(process.pid))
            time.sleep(_POLL_S)
    finally:
        # Everything, or what the tests left behind. The ID is not used again until the process is waited for.
        _kill(process.pid)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    return found or End.EXITED, used.ru_utime + used.ru_stime


def _kill(session: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(session, signal.SIGKILL)


def usage_of(pid: int) -> Usage:
    """Return what a process and its descendants have used; those that have been waited for count."""
    cpu_s = queued_s = 0.0
    with suppress(psutil.NoSuchProcess):
        leader = psutil.Process(pid)
        for process in (leader, *leader.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                cpu_s += times.user + times.system + times.children_user + times.children_system
                queued_s += _queued_s(process.pid)
    return Usage(cpu_s, queued_s)


def _queued_s(pid: int) -> float:
    """Return the seconds for which a process's live threads waited for a core (Linux, sched-stats.rst)."""
    total_ns = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with suppress(OSError):
            total_ns += int(path.read_text().split()[1])
    return total_ns * _NS
