"""`tailrace ...` in a process forked from one that has already imported it, and vLLM if it is needed.

Imports are most of what the start of a service costs, and of a worker with the tiny model; tests start
hundreds. The child runs the same command as `python -m tailrace`.
"""

from __future__ import annotations

import os
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from tests.harness import fork_python
from tests.harness.preloaded import Start

PYTHONPATH: Final = os.environ.get("PYTHONPATH")
"""Where the forked processes find modules: others must be started in another way."""

# The modules that services and simulated workers import at startup.
_SERVICES: Final = [
    "tailrace.cli.main",
    "tailrace.cli.serve",
    "edge_svc.main",
    "frontend_svc.main",
    "migration_svc.main",
    "monitor_svc.main",
    "scheduler_svc.main",
    "tailrace.policy.tailrace.policy",
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
    # It replaces classes of torch: nothing for other processes.
    "vllm.v1.worker.cpu_worker",
]
# Those that the tests of vLLM engines import when they are collected, and the process of vLLM's API server.
_VLLM: Final = [
    "tailrace.cli.main",
    "worker_agent.engine.vllm.engine",
    "frontend_svc.api_server.python_app",
    # The API server imports it, and it compiles dozens of grammars if all its extras are installed.
    "jsonschema",
]
_ROOT: Final = Path(__file__).parents[2]
# How long one may take to import vLLM, on a machine that does much else.
_IMPORTS_S: Final = 300.0
# How long each may hold up the end of a run.
_END_S: Final = 30.0


def _python(path: str) -> str:
    return os.path.join(os.path.dirname(path), "python")


class ForkServer:
    """A process that forks others (preloaded.py). It starts when it is first needed."""

    def __init__(self, modules: Sequence[str]) -> None:
        """`modules`: what it imports."""
        self._modules = modules
        self._path = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._starting = threading.Lock()

    @property
    def known(self) -> str:
        """Return where it listens, "" if it was not started."""
        return self._path

    def use(self, path: str) -> None:
        """Use the one that another process has started."""
        self._path = path

    def path(self) -> str:
        """Return where it listens."""
        with self._starting:
            if not self._path:
                path = os.path.join(tempfile.mkdtemp(prefix="preloaded-"), "socket")
                script = shlex.join([sys.executable, "-I", "-S", fork_python.__file__, path])
                Path(_python(path)).write_text(f'#!/bin/sh\nexec {script} "$@"\n')
                Path(_python(path)).chmod(0o755)
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                    # Here, so that a client can connect before the imports are done.
                    listener.bind(path)
                    listener.listen(128)
                    fd = listener.fileno()
                    self._process = subprocess.Popen(
                        [sys.executable, "-m", "tests.harness.preloaded", str(fd), *self._modules],
                        cwd=_ROOT,
                        # As a front end sets it for its API server; it counts when vLLM is imported.
                        env={**os.environ, "HF_HUB_OFFLINE": "1"},
                        pass_fds=[fd],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.DEVNULL,
                    )
                self._path = path
        return self._path

    def python(self) -> str:
        """Return the path of a `python` whose processes are forked from it."""
        return _python(self.path())

    def connect(self) -> socket.socket:
        """Return a connection to it. It answers once it has imported its modules."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(_IMPORTS_S)
        connection.connect(self.path())
        return connection

    def end(self) -> None:
        """End it, if this process has started it; it starts again when it is next needed."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            # It does not end before the commands do: one that a failed test left must not hold up the run.
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(os.path.dirname(self._path))
        self._path, self._process = "", None


_SERVERS: Final = {
    "services": ForkServer(_SERVICES),
    "vLLM workers": ForkServer(_VLLM_WORKER),
    "vLLM": ForkServer(_VLLM),
}


class ForkedCommand:
    """A running command with the part of subprocess.Popen's interface that `Process` uses."""

    def __init__(
        self, arguments: Sequence[str], log: Path, env: Mapping[str, str], vllm: bool, prelude: str = ""
    ) -> None:
        """`env`: added to that of this process. `vllm`: whether the command needs vLLM. `prelude`: Python
        that runs before it."""
        code = ["-c", f"{prelude}\nfrom tailrace.cli.main import main\nmain()"]
        start = Start(
            arguments=[*(code if prelude else ["-m", "tailrace"]), *arguments],
            env={**os.environ, **env},
            folder=os.getcwd(),
            fds=[0, 1, 2],
            # A process group of its own, so that killing it includes its children.
            session=True,
            dies_with_client=False,
            python=api_server_python(),
        )
        self._returncode: int | None = None
        self._asking = threading.Lock()
        self._connection = _SERVERS["vLLM workers" if vllm else "services"].connect()
        with open(os.devnull, "rb") as nothing, log.open("ab") as out:
            fds = [nothing.fileno(), out.fileno(), out.fileno()]
            socket.send_fds(self._connection, [msgspec.json.encode(start)], fds)
        self._pid = int(self._connection.recv(64))
        self._connection.settimeout(None)

    @property
    def pid(self) -> int:
        """Process ID."""
        return self._pid

    @property
    def returncode(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        with self._asking:
            if self._returncode is None:
                with suppress(BlockingIOError):
                    self._returncode = int(self._connection.recv(64, socket.MSG_DONTWAIT))
            return self._returncode

    def poll(self) -> int | None:
        """Return `returncode`."""
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal to the process, unless it has ended."""
        if self.returncode is None:
            # It has ended, and its exit code is on the way.
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float) -> int:
        """Wait for the end, at most `timeout` seconds, and return the exit code. Raise TimeoutExpired."""
        if self._returncode is None:
            ended = select.poll()
            ended.register(self._connection, select.POLLIN)
            ended.poll(timeout * 1e3)
        if (code := self.returncode) is None:
            raise subprocess.TimeoutExpired("tailrace", timeout)
        return code


def start_servers() -> str:
    """Start all from which a run forks. Return the path of a `python` whose processes have imported vLLM."""
    for server in _SERVERS.values():
        server.path()
    return _SERVERS["vLLM"].python()


def api_server_python() -> str:
    """Return what `start_servers` has returned in this run, "" if they were not started.

    A front end whose `sys.executable` it is starts vLLM's API server so.
    """
    known = _SERVERS["vLLM"].known
    return _python(known) if known else ""


def servers() -> dict[str, str]:
    """Return where those listen that have started, by name."""
    return {name: server.known for name, server in _SERVERS.items() if server.known}


def use_servers(paths: Mapping[str, str]) -> None:
    """Use those of another process, which ends them."""
    for name, path in paths.items():
        _SERVERS[name].use(path)


def end_servers() -> None:
    """End the processes that commands are forked from, if this process has started any.

    They would end by themselves some time after this process, which is too late: a run leaves no process.
    """
    for server in _SERVERS.values():
        server.end()
