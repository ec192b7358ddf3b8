"""`tailrace ...` in a process forked from one that has already imported it, and vLLM if it is needed.

Imports are most of what the start of a service costs, and of a worker with the tiny model; tests start
hundreds. The child runs the same command as `python -m tailrace`.
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
from types import ModuleType
from typing import Final

PYTHONPATH: Final = os.environ.get("PYTHONPATH")
"""Where the forked processes find modules: others must be started in another way."""

# The modules that services and simulated workers import at startup.
_SERVICES: Final = [
    "tailrace.cli.main",
    "frontend_svc.main",
    "migration_svc.main",
    "monitor_svc.main",
    "scheduler_svc.main",
    "worker_agent.main",
    "worker_agent.serving",
    "worker_agent.worker",
    "worker_agent.engine.simulated",
]
# Those that a worker with a vLLM engine imports.
_VLLM_WORKER: Final = [
    "tailrace.cli.main",
    "worker_agent.serving",
    "worker_agent.worker",
    "worker_agent.engine.vllm.engine",
    "vllm.v1.worker.cpu_worker",
]
# How long `end_servers` may hold up the end of a run.
_END_S: Final = 30.0


def _server(modules: list[str]) -> forkserver.ForkServer:
    # It starts with the first process; each child imports modules that are missing here.
    server = forkserver.ForkServer()
    server.set_forkserver_preload(modules)
    return server


# By whether they have imported vLLM.
_SERVERS: Final = {False: _server(_SERVICES), True: _server(_VLLM_WORKER)}
_choosing = threading.Lock()


class ForkedCommand:
    """A running command with the part of subprocess.Popen's interface that `Process` uses."""

    def __init__(self, arguments: Sequence[str], log: Path, env: Mapping[str, str], vllm: bool) -> None:
        """`env`: added to that of this process. `vllm`: whether the command needs vLLM."""
        log.touch()
        environment = {**os.environ, **env}
        context = multiprocessing.get_context("forkserver")
        self._process = context.Process(target=_run, args=(list(arguments), str(log), environment))
        with _choosing:
            # Python has one server a process, and asks it by this function.
            forkserver.connect_to_new_process = _SERVERS[vllm].connect_to_new_process
            # Each child would import it, pytest for example, and needs nothing of it.
            main = sys.modules["__main__"]
            sys.modules["__main__"] = ModuleType("__main__")
            try:
                self._process.start()
            finally:
                sys.modules["__main__"] = main

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

    def send_signal(self, number: int) -> None:
        """Send a signal to the process, unless it has ended."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._process.terminate()

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.kill()

    def wait(self, timeout: float) -> int:
        """Wait for the end, at most `timeout` seconds, and return the exit code. Raise TimeoutExpired."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("tailrace", timeout)
        return self.returncode


def end_servers() -> None:
    """End the processes that commands are forked from, if there are any, and their resource tracker.

    They end by themselves some time after this process, which is too late: a test run leaves no process.
    """

    def end() -> None:
        # Functions for Python's own tests; there is no other way.
        for server in _SERVERS.values():
            server._stop()  # type: ignore[attr-defined]
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
    # What vLLM has set there at its import stays.
    for name in os.environ.keys() - env.keys():
        if name.startswith(("TAILRACE_", "OTEL_")):
            del os.environ[name]
    os.environ.update(env)
    sys.argv = ["tailrace", *arguments]
    # A service can run its command again in its place.
    sys.orig_argv = [sys.executable, "-m", "tailrace", *arguments]
    from tailrace.cli.main import main

    main()
