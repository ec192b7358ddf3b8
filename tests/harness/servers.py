"""Servers for benchmarks to compare: a Tailrace cluster, and plain `vllm serve` with the same engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from tailrace.local.ports import free_ports
from tailrace.tiny import MODEL_PATH, REASONING_PARSER
from tests.harness.usage import descendants
from tests.waiting import WAIT_S

MODEL = "tiny"


class Server:
    """A server with an OpenAI API at `url`."""

    name: str
    url: str

    def pids(self) -> dict[str, list[int]]:
        """Return process IDs by part, for CPU accounting."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        raise NotImplementedError


def wait_until_up(url: str, process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Wait until the process replies to a GET; return False if it exits, or does not reply in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return True
        except OSError:
            time.sleep(0.2)
    return False


def _run_to_end(
    command: Sequence[str], environment: Mapping[str, str], timeout_s: float, folder: Path | None
) -> None:
    """Run a command that cleans up after itself when interrupted; interrupt it if this process is. Raise
    CalledProcessError if it fails, TimeoutExpired if it takes too long."""
    with subprocess.Popen(command, env=environment, cwd=folder, stdout=subprocess.DEVNULL) as process:
        try:
            status = process.wait(timeout=timeout_s)
        except BaseException:  # whatever ends the wait, a signal too
            process.send_signal(signal.SIGINT)
            process.wait(timeout=60)
            raise
    if status != 0:
        raise subprocess.CalledProcessError(status, command)


@dataclass(frozen=True, slots=True)
class Engines:
    """The workers of a cluster."""

    engine: str
    workers: int = 1
    # `--sim`'s, of simulated ones.
    sim: tuple[str, ...] = ()

    def arguments(self) -> list[str]:
        """Return the options of `tailrace up`."""
        sim = [word for each in self.sim for word in ("--sim", each)]
        return ["--workers", str(self.workers), "--no-traces", "--engine", self.engine, *sim]


class TailraceCluster(Server):
    """`tailrace up` with its own run folder."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        front: str = "python",
        checkout: Path | None = None,
        edge_for: Engines | None = None,
    ) -> None:
        """`arguments`: further options of `tailrace up`. `checkout`: run this other checkout's, from its
        `.venv`. `edge_for`: behind an edge, with these workers, and no other options."""
        self.name = name
        self._folder = tempfile.TemporaryDirectory(prefix="tailrace-bench-")
        (port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        self._env = {**os.environ, "TAILRACE_RUN_DIR": self._folder.name}
        python = sys.executable if checkout is None else str(checkout / ".venv" / "bin" / "python")
        # The working directory is first on the interpreter's path.
        self._checkout = checkout
        self._tailrace = [python, "-m", "tailrace"]
        command = [*self._tailrace, "up", "--port", str(port), "--front", front, *arguments]
        if edge_for is not None:
            flags: dict[str, object] = {"served-model-name": MODEL, "reasoning-parser": REASONING_PARSER}
            if edge_for.sim:
                flags["sim"] = list(edge_for.sim)
            model = {"model": str(MODEL_PATH), "engine": edge_for.engine, "replicas": edge_for.workers}
            models = [{**model, "front": front, "flags": flags}]
            fleet = {"http": f"127.0.0.1:{port}", "traces": "none", "models": models}
            file = Path(self._folder.name) / "fleet.yaml"
            # JSON is YAML.
            file.write_text(json.dumps(fleet))
            command = [*self._tailrace, "up", "-f", str(file)]
        _run_to_end(command, self._env, timeout_s=900, folder=checkout)
        self._state = json.loads((Path(self._folder.name) / "state.json").read_text())

    @property
    def admin(self) -> str:
        """Address of the admin API."""
        return str(self._state["admin"])

    @property
    def etcd(self) -> str:
        """Address of etcd, for further workers."""
        return str(self._state["etcd"])

    def pids(self) -> dict[str, list[int]]:
        """Return process IDs by part; numbered of one kind together, the API server apart from its front
        end."""
        found: dict[str, list[int]] = {}
        for part in self._state["parts"]:
            kind = part["spec"]["name"].partition("-")[0]
            first, *children = descendants(part["identity"]["pid"])
            found.setdefault(kind, []).append(first)
            found.setdefault("API server" if kind == "frontend" else kind, []).extend(children)
        return found

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        subprocess.run(
            [*self._tailrace, "down"],
            env=self._env,
            cwd=self._checkout,
            check=True,
            stdout=subprocess.DEVNULL,
            timeout=WAIT_S,
        )
        self._folder.cleanup()


class ServeProcess(Server):
    """A running `vllm serve MODEL OPTIONS`."""

    def __init__(
        self, name: str, model: Path, options: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        """Start it and wait until it replies. `environment`: added to that of this process. Raise
        RuntimeError if it does not start."""
        self.name = name
        (port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
        command += ["--host", "127.0.0.1", "--port", str(port), *options]
        defaults = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        self._log = tempfile.NamedTemporaryFile(prefix="vllm-serve-", suffix=".log")  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, **defaults, **environment},
            start_new_session=True,
        )
        try:
            self._wait()
        except BaseException:  # whatever ends the wait, a signal too: the process must not outlive it
            self.__exit__(None, None, None)
            raise

    def _wait(self) -> None:
        if wait_until_up(f"{self.url}/v1/models", self._process, 600):
            return
        log = Path(self._log.name).read_text(errors="replace")
        raise RuntimeError(f"{self.name} did not start:\n{log[-6000:]}")

    def pids(self) -> dict[str, list[int]]:
        """Return the process tree as two parts: engine core and API server."""
        found: dict[str, list[int]] = {}
        for pid in descendants(self._process.pid):
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            found.setdefault("engine core" if "Engine" in name else "API server", []).append(pid)
        return found

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(timeout=10)
        self._log.close()


class VllmServe(ServeProcess):
    """`vllm serve` with the worker's engine settings, engine core and API server in one process each."""

    def __init__(self, name: str, rust_front: Path | None = None) -> None:
        """`rust_front`: the vllm-rs executable; None: vLLM's Python API server."""
        options = ["--served-model-name", MODEL]
        options += ["--reasoning-parser", REASONING_PARSER, "--enforce-eager", "--block-size", "32"]
        options += ["--num-gpu-blocks-override", "4096", "--dtype", "float32"]
        options += ["--distributed-executor-backend", "uni"]
        options += ["--no-async-scheduling"]
        if rust_front is None:
            options += ["--uvicorn-log-level", "warning"]  # vllm-rs rejects unknown options
        environment = {
            # Without this vLLM replaces `uni` by `mp`, which spins on shared memory on two cores.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            # As `tailrace up` sets for one worker: all cores but one, which is for the API server.
            "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) - 1)),
        }
        if rust_front is not None:
            environment |= {"VLLM_USE_RUST_FRONTEND": "1", "VLLM_RUST_FRONTEND_PATH": str(rust_front)}
        super().__init__(name, MODEL_PATH, options, environment)
