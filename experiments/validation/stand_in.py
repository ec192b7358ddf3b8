"""A simulated engine that serves in place of a real worker while that one profiles itself.

On a machine with few cores a worker is slower while API server, front end, scheduler and clients are active.
A profile for the loaded worker is therefore measured under exactly that load, served by a simulated engine,
which uses almost no CPU itself. And since its step times are known, the clients' additional latency is that
of the path:
HTTP, tokenization, placement, and everything in between.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import msgspec

from tailrace.cli.admin import connect
from tailrace.profiles import Profile
from tailrace.v1 import admin_pb2, types_pb2
from tests.harness.servers import TailraceCluster

NAME: Final = "stand-in"
_READY_S: Final = 60.0
_CALL_S: Final = 10.0
_STOP_S: Final = 30.0
_POLL_S: Final = 0.1


class StandIn:
    """Serves every new request in place of the worker for the block."""

    def __init__(
        self, cluster: TailraceCluster, instance: str, profile: Profile, engine_arguments: dict[str, object]
    ) -> None:
        """`instance`: the worker. `profile`: step times. `engine_arguments`: fields of SimulatedSettings."""
        self._cluster = cluster
        self._instance = instance
        self._profile = profile
        self._arguments = engine_arguments

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="tailrace-stand-in-")
        file = Path(self._folder.name) / "profile.json"
        file.write_bytes(msgspec.json.encode(self._profile))
        command = [sys.executable, "-m", "tailrace", "serve", "worker", "--etcd", self._cluster.etcd]
        command += ["--engine", "simulated", "--id", NAME, "--model", self._profile.model]
        for name, value in {**self._arguments, "profile": str(file)}.items():
            command.append(f"--sim={name}={msgspec.json.encode(value).decode()}")
        with (Path(self._folder.name) / "log").open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ
            )
        try:
            self._wait_ready()
            self._drain("drain", self._instance)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._drain("drain", "--undrain", self._instance)
        finally:
            self._stop()

    def _wait_ready(self) -> None:
        deadline_s = time.monotonic() + _READY_S
        with connect(self._cluster.admin) as admin:
            while time.monotonic() < deadline_s:
                if self._process.poll() is not None:
                    log = (Path(self._folder.name) / "log").read_text(errors="replace")
                    raise RuntimeError(f"the stand-in exited while starting:\n{log[-3000:]}")
                reply = admin.stub.ListInstances(admin_pb2.ListInstancesRequest(), timeout=_CALL_S)
                active = types_pb2.INSTANCE_STATE_ACTIVE
                if any(each.instance_id == NAME and each.state == active for each in reply.instances):
                    return
                time.sleep(_POLL_S)
        raise TimeoutError(f"the stand-in was not active after {_READY_S:.0f} s")

    def _drain(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "tailrace", *arguments, "--admin", self._cluster.admin]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=60)

    def _stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_STOP_S)
        self._folder.cleanup()
