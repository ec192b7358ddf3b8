"""End what a test run started, once the run is over, however it ended.

    python -m tests.leftovers MARK PID [PID...]

Tests start clusters in sessions of their own, which no signal to pytest reaches. So the run marks its
environment, which every process that it starts inherits, and this program waits beside it: as soon as one of
the given processes (pytest, and the `make` that started it) is gone, it ends the first of them and all that
bear the mark.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

# Not one of Tailrace's own variables: fleets are started without those of the developer's shell.
_MARK: Final = "TEST_RUN_OF_TAILRACE"
# How long processes have to clean up after themselves (shared memory, leases) before they are killed.
_GRACE_S: Final = 10.0
_KILL_S: Final = 10.0


def end_with_this_process() -> None:
    """Mark this process's environment; end whatever inherits it once this process, or its `make`, is gone."""
    mark = os.environ[_MARK] = uuid.uuid4().hex
    watched = [os.getpid()]
    # Only make runs pytest as a part of itself; a shell may end before a run in the background. Of pytest
    # inside a namespace of processes, the parent is outside, and has no number there.
    if "MAKELEVEL" in os.environ and (parent := os.getppid()):
        watched.append(parent)
    environment = {name: value for name, value in os.environ.items() if name != _MARK}
    subprocess.Popen(
        [sys.executable, "-m", "tests.leftovers", mark, *map(str, watched)],
        cwd=Path(__file__).parents[1],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        # A session of its own: Ctrl-C in a terminal must not end it.
        start_new_session=True,
    )


def marked(mark: str) -> list[int]:
    """Return the processes whose environment bears the mark."""
    wanted = f"{_MARK}={mark}".encode()
    found = []
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal():
            continue
        # Gone meanwhile, or somebody else's.
        with suppress(OSError):
            if wanted in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
    return found


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _end(mark: str, number: signal.Signals, timeout_s: float) -> None:
    """Send the signal, also to processes that start meanwhile, until none is left or the time is over."""
    until_s = time.monotonic() + timeout_s
    sent: set[int] = set()
    while (pids := marked(mark)) and time.monotonic() < until_s:
        _signal([pid for pid in pids if pid not in sent], number)
        sent.update(pids)
        time.sleep(0.1)


def main() -> None:
    """Wait for the end of one of the processes, then end all others."""
    mark, *pids = sys.argv[1:]
    # One that is gone already has no handle; the number could be another process's by now.
    handles: list[int] = []
    with suppress(ProcessLookupError):
        handles += map(os.pidfd_open, map(int, pids))
    if len(handles) == len(pids):
        select.select(handles, [], [])
    if handles:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(handles[0], signal.SIGTERM)
    if left := marked(mark):
        # Who read the output may be gone too, as with `make test | head`.
        with suppress(OSError):
            print(f"tests: ending {len(left)} processes that the run left", file=sys.stderr)
    _end(mark, signal.SIGTERM, _GRACE_S)
    _end(mark, signal.SIGKILL, _KILL_S)


if __name__ == "__main__":
    main()
