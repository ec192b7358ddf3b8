"""`tailrace` as a user runs it in a folder."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tailrace.local.state import RunFolder, RunState
from tests.harness.processes import FAST_FRONT
from tests.ports import free_port
from tests.waiting import WAIT_S

UP_S: Final = WAIT_S
"""Deadline of a command, `tailrace up` included."""
UNREACHABLE_PROXY: Final = dict.fromkeys(
    ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), "http://127.0.0.1:1"
) | dict.fromkeys(("no_proxy", "NO_PROXY", "no_grpc_proxy"), "")
"""What an environment says of a proxy for the world outside."""


class WorkingFolder:
    """A folder in which `tailrace` runs, with its state and logs in `.run`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder = RunFolder(path / ".run")
        self.port = free_port()

    def command(self, *arguments: str) -> list[str]:
        """Return a command line of `tailrace`."""
        return [sys.executable, "-m", "tailrace", *arguments]

    def environment(self) -> dict[str, str]:
        """Return this environment without what configures Tailrace in it."""
        ours = ("TAILRACE_", "OTEL_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        # The examples are not installed with the packages.
        return kept | {"PYTHONPATH": str(Path(__file__).parents[2])}

    def tailrace(self, *arguments: str, timeout_s: float = UP_S) -> subprocess.CompletedProcess[str]:
        """Run `tailrace` to its end, in an environment with a proxy that does not answer."""
        environment = (
            self.environment() | UNREACHABLE_PROXY | {"no_proxy": "", "NO_PROXY": "", "no_grpc_proxy": ""}
        )
        return self._run(self.command(*arguments), environment, timeout_s)

    def run(self, *command: str, timeout_s: float = UP_S) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return self._run(command, self.environment(), timeout_s)

    def _run(
        self, command: Sequence[str], environment: Mapping[str, str], timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=self.path,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    def up(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `tailrace up` with simulated engines."""
        common = ("--engine", "simulated", "--front", FAST_FRONT, "--port", str(self.port))
        return self.tailrace("up", *common, *arguments)

    def state(self) -> RunState:
        """Return the current state, which changes when parts are restarted."""
        state = self.folder.read()
        assert state is not None
        return state
