"""`tailrace ...` in a process forked from one that has imported it, and vLLM, already.

Importing vLLM takes longer than all else that a worker of the tiny model does until it serves, and tests kill
many workers. What runs in the child is the command itself, as `python -m tailrace` runs it.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

# What a worker imports until it serves.
_PRELOADED = [
    "tailrace.cli.main",
    "worker_agent.main",
    "worker_agent.worker",
    "worker_agent.engine.vllm.engine",
    "vllm.v1.worker.cpu_worker",
]


class ForkedCommand:
    """A running command with what `Process` needs of subprocess.Popen."""

    def __init__(self, arguments: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        context = multiprocessing.get_context("forkserver")
        # Heard when the first process is started; one that is missing here is imported by each child.
        context.set_forkserver_preload(_PRELOADED)
        self._process = context.Process(target=_run, args=(list(arguments), str(log), dict(env)))
        self._process.start()

    @property
    def pid(self) -> int:
        """Process id."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """As `returncode`."""
        return self.returncode

    def terminate(self) -> None:
        """SIGTERM."""
        self._process.terminate()

    def wait(self, timeout: float) -> int:
        """Wait for the end; the exit code. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("tailrace", timeout)
        return self.returncode


def _run(arguments: list[str], log: str, env: dict[str, str]) -> None:
    # A group of its own: killing it takes its children along.
    os.setsid()
    out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    os.environ.update(env)
    sys.argv = ["tailrace", *arguments]
    from tailrace.cli.main import main

    main()
