"""Processes that a test starts, freezes and kills, each with its log."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tailrace.local.ports import free_ports


def free_port() -> int:
    """A TCP port on loopback that nothing listens on."""
    return free_ports(1)[0]


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
    """Poll until the condition holds; TimeoutError naming `what` otherwise."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s:.0f} s for {what}")
        time.sleep(0.02)


class Process:
    """One child process. Its output goes to a file, so that it never blocks on a pipe."""

    def __init__(self, name: str, command: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        self.name = name
        self.log = log
        with log.open("ab") as out:
            self._popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, **env},
                # A group of its own: killing it takes its children along.
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._popen.pid

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return self._popen.poll() is None

    def text(self) -> str:
        """Its log so far."""
        return self.log.read_text(errors="replace")

    def wait_for(self, pattern: str, timeout_s: float = 60.0) -> re.Match[str]:
        """The first match of a pattern in the log; fails at once when the process ends without it."""
        deadline = time.monotonic() + timeout_s
        compiled = re.compile(pattern)
        while True:
            alive = self.alive
            if found := compiled.search(self.text()):
                return found
            if not alive:
                raise RuntimeError(f"{self.name} ended ({self._popen.returncode}):\n{self.text()[-3000:]}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.name} did not log {pattern!r}:\n{self.text()[-3000:]}")
            time.sleep(0.02)

    def kill(self) -> None:
        """kill -9, children included."""
        if self.alive:
            os.killpg(self.pid, signal.SIGKILL)
            self._popen.wait(timeout=10)

    def freeze(self) -> None:
        """SIGSTOP: it hangs without dying. It has stopped when this returns."""
        os.killpg(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def thaw(self) -> None:
        """SIGCONT."""
        os.killpg(self.pid, signal.SIGCONT)

    def stop(self, timeout_s: float = 10.0) -> int:
        """SIGTERM, then kill -9 after the timeout; the exit code."""
        if self.alive:
            os.killpg(self.pid, signal.SIGCONT)
            self._popen.terminate()
            try:
                self._popen.wait(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                self.kill()
        return int(self._popen.returncode)


def tailrace(*arguments: str) -> list[str]:
    """The command line of `tailrace ...` in this environment."""
    return [sys.executable, "-m", "tailrace", *arguments]
