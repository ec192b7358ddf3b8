"""`tailrace doctor` finds what is broken on a host, and says how to mend it."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner

from tailrace.cli.main import main
from tailrace.local import state
from tailrace.local.host_checks import Host, Verdict, check_host
from tailrace.local.plan import PartSpec, Tier
from tailrace.local.requirements import gpu_bytes
from tailrace.local.state import Part, RunFolder, RunState, identify
from tailrace.security.authority import Authority
from tailrace.security.roles import Identity, Role
from tailrace.tiny import MODEL_PATH
from tailrace.v1 import admin_pb2, types_pb2
from tests.cli.conftest import Run
from tests.cli.scripted_admin import Script, serving
from tests.waiting import WAIT_S

_BEHIND_S = 3_600.0


class _OldEtcd(BaseHTTPRequestHandler):
    """An etcd of years ago, on a machine whose clock is an hour behind."""

    def do_GET(self) -> None:
        body = json.dumps({"etcdserver": "3.3.27", "etcdcluster": "3.3.0"}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def date_time_string(self, timestamp: float | None = None) -> str:
        return formatdate(time.time() - _BEHIND_S, usegmt=True)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def old_etcd() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), _OldEtcd)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def problems(host: Host) -> dict[str, str]:
    """Return the details of the problems that are found, by subject."""
    found = list(check_host(host))
    assert all(finding.mend for finding in found if finding.verdict is not Verdict.OK)
    return {finding.subject: finding.detail for finding in found if finding.verdict is Verdict.PROBLEM}


def test_eight_broken_things_are_found(tmp_path: Path, old_etcd: str) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "keys.json").write_text("{")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = ["prlimit", "--nofile=1024:1024", sys.executable, "-m", "tailrace", "doctor"]
        command += [str(tmp_path / "model"), "--port", str(port), "--api-keys", str(tmp_path / "keys.json")]
        command += ["--etcd", f"127.0.0.1:1,{old_etcd}", "-o", "json"]
        environment = {**os.environ, "UCX_NET_DEVICES": "nowhere0", "TAILRACE_RUN_DIR": str(tmp_path / "run")}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    found = {each["subject"]: each for each in report["findings"] if each["verdict"] == "problem"}
    # This machine may lack something, too.
    assert found.keys() >= {
        "model",
        "file limit",
        "UCX_NET_DEVICES",
        "HTTP port",
        "API keys",
        "etcd 127.0.0.1:1",
        f"etcd {old_etcd}",
        "clock",
    }
    assert report["problems"] == len(found)
    assert all(each["mend"] for each in found.values())
    # HTTP tells whole seconds, and a busy machine may take some to read them.
    assert re.match(r"36[0-5]\d s ahead of", found["clock"]["detail"])


def test_an_expired_certificate(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path / "certs")
    folder = authority.issue(Identity(Role.WORKER, "worker-0")).folder
    assert "certificate" not in problems(Host(environment={}, certificates=folder, folder=tmp_path))
    soon = authority.issue(Identity(Role.WORKER, "worker-1"), days=3.0).folder
    assert (
        "ends in 3 days" in problems(Host(environment={}, certificates=soon, folder=tmp_path))["certificate"]
    )
    missing = Host(environment={}, certificates=tmp_path / "none", folder=tmp_path)
    assert "No such file" in problems(missing)["certificate"]


def test_rdma_needs_locked_memory(tmp_path: Path) -> None:
    (tmp_path / "sys/class/infiniband/mlx5_0/ports/1").mkdir(parents=True)
    (tmp_path / "dev/shm").mkdir(parents=True)
    code = (
        "import resource, sys; from pathlib import Path;"
        "from tailrace.local.host_checks import Host, check_host;"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20));"
        "print([f.detail for f in check_host(Host({}, root=Path(sys.argv[1]))) if f.subject == 'RDMA'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=WAIT_S
    )
    assert "memory locks are limited to 1048576 bytes" in done.stdout, done.stderr


def test_what_is_wrong_with_a_fleet(run: Run, script: Script) -> None:
    script.instances[0].state = types_pb2.INSTANCE_STATE_SUSPECT
    name = script.instances[0].instance_id
    del script.services[:]
    script.services.append(admin_pb2.ServiceInfo(kind="scheduler", id="s", address="10.0.0.1:1", leader=True))
    script.services[0].metrics_address = "127.0.0.1:2"
    script.policies.append(admin_pb2.PolicyInfo(name="mine", active=True, suspended="place: KeyError"))
    result = run("doctor", "-o", "json")
    assert result.exit_code == 1
    found = {each["subject"]: each for each in json.loads(result.stdout)["findings"]}
    assert found[f"instance {name}"]["detail"] == "suspect"
    assert found["monitor"]["detail"] == found["migration"]["detail"] == "none leads"
    assert found["frontend"]["detail"] == "there is none"
    assert found["policy mine"]["detail"] == "place: KeyError"
    assert found["scheduler s"]["verdict"] == "note" and "Prometheus" in found["scheduler s"]["detail"]
    assert found["monitor"]["mend"] in run("doctor").stdout


def part(name: str, tier: Tier, pid: int, *command: str, members: Sequence[str] = ()) -> Part:
    """Return a process of this folder's cluster, and its log."""
    spec = PartSpec(name, tier, command, "127.0.0.1:1", members=members)
    identity = identify(pid) if pid else state.Identity(1, 0, "a boot of the past")
    return Part(identity=identity, log=f"{name}.log", spec=spec)


def doctor_of(folder: Path, monkeypatch: pytest.MonkeyPatch, local: RunState) -> dict[str, dict[str, str]]:
    """Return what doctor finds beside a local cluster, by subject."""
    monkeypatch.setenv("TAILRACE_RUN_DIR", str(folder))
    RunFolder(folder).write(local)
    result = CliRunner().invoke(main, ["doctor", "-o", "json"])
    return {each["subject"]: each for each in json.loads(result.stdout)["findings"]}


def test_one_finding_for_a_worker_that_has_ended(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for instance in script.instances:
        instance.state = types_pb2.INSTANCE_STATE_SUSPECT
    parts = [part("w", Tier.WORKER, 0, "tailrace", "serve", "worker", members=["worker-0"])]
    parts.append(part("monitor", Tier.CONTROL, 0, "tailrace", "serve", "monitor"))
    with serving(script) as address:
        found = doctor_of(tmp_path, monkeypatch, RunState(parts=parts, admin=address, http="http://a:1"))
    assert found["w"]["mend"] == "tailrace restart w; w.log may say why"
    assert found["monitor"]["detail"] == "it has ended"
    assert not found.keys() & {"instance worker-0"} and found["instances"]["verdict"] == "ok"
    # Of that one, the cause is another.
    assert found["instance worker-1"]["detail"] == "suspect" and found["migration"]["detail"] == "none leads"


@pytest.mark.parametrize("flag", [["--api-keys=k"], ["--api-keys", "k"]])
def test_the_keys_of_the_cluster_that_runs_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: list[str]
) -> None:
    (tmp_path / "k").write_text("garbage")
    (tmp_path / "below").mkdir()
    edge = part("edge", Tier.EDGE, os.getpid(), "tailrace", "serve", "edge", *flag)
    local = RunState(parts=[edge], admin="127.0.0.1:1", http="http://a:1", directory=str(tmp_path))
    found = doctor_of(tmp_path / "below", monkeypatch, local)["API keys"]
    assert found["detail"].startswith(f"{tmp_path}/k: no usable file of API keys (")
    assert "restore a copy of it" in found["mend"] and f"--file {tmp_path}/k" in found["mend"]


@pytest.mark.parametrize("alive", [True, False])
def test_a_scheduler_that_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alive: bool) -> None:
    parts = [part("scheduler", Tier.CONTROL, os.getpid() * alive, "tailrace", "serve", "scheduler")]
    local = RunState(parts=parts, admin="127.0.0.1:1", http="http://a:1")
    found = doctor_of(tmp_path, monkeypatch, local)
    assert ("scheduler" in found, "fleet" in found) == (not alive, alive)
    assert not alive or found["fleet"]["mend"] == "tailrace logs scheduler may say why"


def test_an_unreachable_fleet(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tailrace", "doctor", "--admin", "127.0.0.1:1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, cwd=tmp_path)
    assert done.returncode == 1
    assert "PROBLEM  fleet: " in done.stdout


@pytest.mark.parametrize(
    ("gib", "free_gib", "gpu_gib", "verdict", "detail"),
    [
        (2, 20, (), Verdict.OK, "2.1 GB of weights"),
        (10, 20, (), Verdict.NOTE, "10.7 GB and no GPU"),
        (10, 8, (), Verdict.PROBLEM, "weights of 10.7 GB, and 8.6 GB of memory are available"),
        (10, 8, (80, 80), Verdict.OK, "10.7 GB of weights"),
        (100, 8, (80, 80), Verdict.PROBLEM, "weights of 107.4 GB, and a worker has 1 x 86 GB"),
    ],
)
def test_a_model_too_large_for_the_machine(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gib: int,
    free_gib: int,
    gpu_gib: tuple[int, ...],
    verdict: Verdict,
    detail: str,
) -> None:
    model = tmp_path / "model"
    shutil.copytree(MODEL_PATH, model, ignore=shutil.ignore_patterns("*.safetensors"))
    with (model / "model.safetensors").open("wb") as weights:
        # A hole: nothing is written.
        weights.truncate(gib << 30)
    (tmp_path / "proc").mkdir()
    (tmp_path / "dev" / "shm").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text(f"MemAvailable:   {free_gib << 20} kB\n")
    tool = tmp_path / "nvidia-smi"
    sizes = " ".join(str(size << 10) for size in gpu_gib)
    tool.write_text(f"#!/bin/sh\nfor size in {sizes}; do echo $size; done\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    gpus = tuple(str(number) for number in range(len(gpu_gib)))
    host = Host({}, root=tmp_path, gpus=gpus, gpu_bytes=gpu_bytes(), model=str(model), folder=tmp_path)
    (found,) = [finding for finding in check_host(host) if finding.subject == "model"]
    assert (found.verdict, detail in found.detail) == (verdict, True), found
