"""Processes that a test starts, freezes and kills, each with a log file."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from tests.harness.forked import ForkedCommand
from tests.waiting import WAIT_S

FAST_FRONT: Final = "rust" if (Path(sys.executable).parent / "vllm-rs").exists() else "python"
"""The API server that starts at once, if it is installed."""


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
    """Poll until the condition holds. Raise TimeoutError with the description `what` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s:.0f} s for {what}")
        time.sleep(0.02)


class Process:
    """One child process. Its output is written to a file, so that it never blocks on a pipe."""

    def __init__(self, name: str, child: subprocess.Popen[bytes] | ForkedCommand, log: Path) -> None:
        self.name = name
        self.log = log
        self._child = child

    @classmethod
    def launch(
        cls, name: str, command: Sequence[str], log: Path, env: Mapping[str, str], niceness: int = 0
    ) -> Process:
        """Run a command; `niceness` is its and its children's."""
        with log.open("ab") as out:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, **env},
                # A process group of its own, so that killing it includes its children.
                start_new_session=True,
            )
        return cls(name, child, log)._set_niceness(niceness)

    @classmethod
    def fork_tailrace(
        cls,
        name: str,
        arguments: Sequence[str],
        log: Path,
        env: Mapping[str, str],
        niceness: int = 0,
        vllm: bool = False,
    ) -> Process:
        """Run `tailrace` with these arguments in a process that has already imported it, or `vllm` too."""
        return cls(name, ForkedCommand(arguments, log, env, vllm), log)._set_niceness(niceness)

    def _set_niceness(self, niceness: int) -> Process:
        if niceness:
            os.setpriority(os.PRIO_PROCESS, self.pid, niceness)
        return self

    @property
    def pid(self) -> int:
        """Process ID."""
        return self._child.pid

    @property
    def alive(self) -> bool:
        """Whether the process is running or frozen."""
        return self._child.poll() is None

    def text(self) -> str:
        """Return the log so far."""
        return self.log.read_text(errors="replace")

    def wait_for(self, pattern: str, timeout_s: float = WAIT_S) -> re.Match[str]:
        """Wait for a pattern in the log and return its first match.

        Raise RuntimeError if the process ends without it, TimeoutError after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        compiled = re.compile(pattern)
        while True:
            alive = self.alive
            if found := compiled.search(self.text()):
                return found
            if not alive:
                raise RuntimeError(f"{self.name} ended ({self._child.returncode}):\n{self.text()[-3000:]}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.name} did not log {pattern!r}:\n{self.text()[-3000:]}")
            time.sleep(0.02)

    def kill(self) -> None:
        """Send SIGKILL to the process and its children."""
        if self.alive:
            os.killpg(self.pid, signal.SIGKILL)
            self._child.wait(timeout=WAIT_S)

    def freeze(self) -> None:
        """Send SIGSTOP and wait until the process has stopped: it hangs without dying."""
        os.killpg(self.pid, signal.SIGSTOP)
        wait_until(lambda: not self.alive or self._stopped(), f"{self.name} to stop")

    def _stopped(self) -> bool:
        tasks = Path(f"/proc/{self.pid}/task").glob("*/stat")
        return all(task.read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)

    def thaw(self) -> None:
        """Send SIGCONT."""
        os.killpg(self.pid, signal.SIGCONT)

    def stop(self, timeout_s: float = WAIT_S) -> int:
        """Send SIGTERM, after the timeout SIGKILL, and return the exit code."""
        if self.alive:
            os.killpg(self.pid, signal.SIGCONT)
            self._child.terminate()
            try:
                self._child.wait(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                self.kill()
        code = self._child.returncode
        assert code is not None
        return int(code)


def tailrace(*arguments: str) -> list[str]:
    """Return the command line of `tailrace ...` in this environment."""
    return [sys.executable, "-m", "tailrace", *arguments]
