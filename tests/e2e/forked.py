"""`tailrace ...` in a process forked from one that has already imported it and vLLM.

Importing vLLM takes most of the startup time of a worker with the tiny model, and tests kill many workers.
The child runs the same command as `python -m tailrace`.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

# The modules that a worker imports at startup.
_PRELOADED = [
    "tailrace.cli.main",
    "worker_agent.main",
    "worker_agent.worker",
    "worker_agent.engine.vllm.engine",
    "vllm.v1.worker.cpu_worker",
]


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


def _run(arguments: list[str], log: str, env: dict[str, str]) -> None:
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
