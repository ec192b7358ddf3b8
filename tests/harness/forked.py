"""`tailrace ...` in a process forked from one that has already imported it and vLLM.

Importing vLLM takes most of the startup time of a worker with the tiny model, and tests kill many workers.
The child runs the same command as `python -m tailrace`.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Final

# The modules that a worker imports at startup.
_PRELOADED = [
    "tailrace.cli.main",
    "worker_agent.serving",
    "worker_agent.worker",
    "worker_agent.engine.vllm.engine",
    "vllm.v1.worker.cpu_worker",
]
# How long `end_server` may hold up the end of a run.
_END_S: Final = 30.0


class ForkedCommand:
    """A running command with the part of subprocess.Popen's interface that `Process` uses."""

    def __init__(self, arguments: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        context = multiprocessing.get_context("forkserver")
        # Takes effect when the first process starts; each child imports modules that are missing here.
        context.set_forkserver_preload(_PRELOADED)
        self._process = context.Process(target=_run, args=(list(arguments), str(log), dict(env)))
        self._process.start()

    @property
    def pid(self) -> int:
        """Process ID."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return `returncode`."""
        return self.returncode

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._process.terminate()

    def wait(self, timeout: float) -> int:
        """Wait for the end, at most `timeout` seconds, and return the exit code. Raise TimeoutExpired."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("tailrace", timeout)
        return self.returncode


def end_server() -> None:
    """End the process that commands are forked from, if there is one, and its resource tracker.

    Both end by themselves some time after this process, which is too late: a test run leaves no process.
    """

    def end() -> None:
        # Functions for Python's own tests; there is no other way.
        forkserver._forkserver._stop()  # type: ignore[attr-defined]
        resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]

    # The tracker does not end before the commands do: one that a failed test left must not hold up the run.
    thread = threading.Thread(target=end, daemon=True)
    thread.start()
    thread.join(_END_S)


def _run(arguments: list[str], log: str, env: dict[str, str]) -> None:
    # As in a process that was not forked. Locks would have names otherwise, which a worker leaves at its end.
    multiprocessing.set_start_method(None, force=True)
    # A process group of its own, so that killing it includes its children.
    os.setsid()
    out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    os.environ.update(env)
    sys.argv = ["tailrace", *arguments]
    from tailrace.cli.main import main

    main()
