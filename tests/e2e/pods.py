"""Run by test_pods.py in namespaces of its own: what `tailrace render kubernetes` makes,
run as Kubernetes does.

A pod is a network namespace with an address, and its volumes are folders; its containers' commands,
environment and probes run as they are written.
"""

from __future__ import annotations

import base64
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import yaml

from examples.fleet import Chat
from tailrace.service.etcd import find_etcd
from tailrace.tiny import MODEL_PATH
from tailrace.tiny.task import task
from tests.harness.chats import Chats
from tests.harness.namespaces import ip, prepare, run
from tests.harness.processes import wait_until
from tests.waiting import WAIT_S

NETWORK, PORT = "10.79.0", 8000
PROMPT = task("wxyz", 120, 90).prompt
FLEET = {
    "models": [
        {
            "model": str(MODEL_PATH),
            "engine": "simulated",
            "front": "rust",
            "http": f"0.0.0.0:{PORT}",
            "replicas": 2,
            "flags": {
                "served-model-name": "tiny",
                "api-key": "none",
                "encrypt-kv": True,
                "sim": ["speed=0.4"],
            },
        }
    ],
    "policy": {"name": "least_loaded"},
    "tls": True,
    "kubernetes": {"etcd": 1},
}


class Pod:
    """A pod: its specification, its address, and its process."""

    def __init__(self, folder: Path, name: str, number: int, spec: Mapping[str, Any]) -> None:
        self.name, self.folder, self.spec = name, folder / name, spec
        self.address = f"{NETWORK}.{number}"
        (self.container,) = spec["containers"]
        self.process: subprocess.Popen[bytes] | None = None
        ip("netns", "add", name)
        ip("link", "add", f"pod{number}", "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("link", "set", f"pod{number}", "master", "bridge0", "up")
        for arguments in (
            ["address", "add", f"{self.address}/24", "dev", "eth0"],
            ["link", "set", "eth0", "up"],
        ):
            ip("-n", name, *arguments)
        ip("-n", name, "link", "set", "lo", "up")

    def mount(self, secrets: Mapping[str, Mapping[str, bytes]]) -> None:
        """Make its volumes."""
        for volume in self.spec["volumes"]:
            path = self.folder / volume["name"]
            path.mkdir(parents=True, exist_ok=True)
            secret = volume.get("secret", {})
            for item in secret.get("items", []):
                file = path / item["path"]
                file.parent.mkdir(exist_ok=True)
                file.write_bytes(secrets[secret["secretName"]][item["key"]])
                file.chmod(secret["defaultMode"])
        (self.folder / "etcd").mkdir(exist_ok=True)

    def _run(self, command: list[str]) -> list[str]:
        """Return what runs a command in the pod, as its container."""
        mounts = [
            f"mount --bind {shlex.quote(str(self.folder / mount['name']))} {mount['mountPath']}"
            for mount in self.container["volumeMounts"]
            # Shared with the machine, as the programs are.
            if mount["name"] not in ("tmp", "shm")
        ]
        script = " && ".join([*mounts, 'exec "$0" "$@"'])
        return ["ip", "netns", "exec", self.name, "sh", "-c", script, *map(self._expanded, command)]

    def _expanded(self, word: str) -> str:
        return word.replace("$(POD_NAME)", self.name).replace("$(POD_IP)", self.address).replace("$$", "$")

    def environment(self) -> dict[str, str]:
        """Return the container's environment, and where this machine has programs."""
        programs = f"{Path(sys.executable).parent}:{find_etcd().parent}:{os.environ['PATH']}"
        given = {each["name"]: each.get("value", "") for each in self.container["env"]}
        own = {name: value for name, value in os.environ.items() if not name.startswith("TAILRACE_")}
        paths = os.pathsep.join(map(os.path.abspath, filter(None, sys.path)))
        return {**own, **given, "PATH": programs, "PYTHONPATH": paths}

    def start(self) -> None:
        """Start the container."""
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                self._run(self.container["command"]), env=self.environment(), stdout=log, stderr=log
            )

    def ready(self) -> bool:
        """Run the readiness probe."""
        assert self.process is not None and self.process.poll() is None, (self.folder / "log").read_text()
        probe = self.container["readinessProbe"]
        port = probe.get("tcpSocket", {}).get("port")
        connect = ["python", "-c", f"import socket; socket.create_connection(('{self.address}', {port}), 5)"]
        command = self._run(connect if port else probe["exec"]["command"])
        done = subprocess.run(command, env=self.environment(), capture_output=True, timeout=WAIT_S)
        return done.returncode == 0

    def stop(self) -> int:
        """Stop the container as Kubernetes does; return its exit code. Raise TimeoutExpired."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(self.spec["terminationGracePeriodSeconds"])


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Pod]]:
    prepare()
    # UCX looks for its network devices there, and `ip netns exec` does the same.
    run("mount", "-t", "sysfs", "sysfs", "/sys")
    folder = tmp_path_factory.mktemp("pods")
    (folder / "fleet.yaml").write_text(yaml.safe_dump(FLEET))
    render = [sys.executable, "-m", "tailrace", "render", "kubernetes", "-f", "fleet.yaml"]
    subprocess.run(render, cwd=folder, check=True, timeout=WAIT_S)
    objects = [
        each
        for name in ("fleet.yaml", "secrets.yaml")
        for each in yaml.safe_load_all((folder / "kubernetes" / name).read_text())
    ]
    secrets = {
        each["metadata"]["name"]: {key: base64.b64decode(text) for key, text in each["data"].items()}
        for each in objects
        if each["kind"] == "Secret"
    }
    ip("link", "add", "bridge0", "type", "bridge")
    ip("address", "add", f"{NETWORK}.254/24", "dev", "bridge0")
    ip("link", "set", "bridge0", "up")
    known: dict[str, Pod] = {}
    for each in objects:
        if each["kind"] in ("StatefulSet", "Deployment"):
            for number in range(each["spec"]["replicas"]):
                name = f"{each['metadata']['name']}-{number}"
                known[name] = Pod(folder, name, len(known) + 1, each["spec"]["template"]["spec"])
                known[name].mount(secrets)
    _mount_names(folder, known)
    try:
        for pod in known.values():
            pod.start()
        for pod in known.values():
            wait_until(pod.ready, f"{pod.name} to be ready")
        yield known
    finally:
        for pod in known.values():
            if pod.process is not None:
                pod.process.kill()
                pod.process.wait()


def _mount_names(folder: Path, pods: Mapping[str, Pod]) -> None:
    """Give the pods their names, and the folders into which volumes are mounted, in this mount namespace."""
    etc = folder / "etc"
    run("cp", "-a", "/etc", str(etc))
    for path in ("tailrace/tls", "tailrace/keys"):
        (etc / path).mkdir(parents=True, exist_ok=True)
    lines = ["127.0.0.1 localhost"]
    for name, pod in pods.items():
        service = name.rpartition("-")[0]
        lines.append(f"{pod.address} {name}.{service}.tailrace.svc {service}")
    (etc / "hosts").unlink()
    (etc / "hosts").write_text("\n".join([*lines, ""]))
    run("mount", "--bind", str(etc), "/etc")
    run("mount", "-t", "tmpfs", "tmpfs", "/var/lib")
    for path in ("tailrace", "etcd"):
        Path("/var/lib", path).mkdir()


def test_a_pod_that_is_deleted_hands_its_requests_over(pods: dict[str, Pod]) -> None:
    chats = Chats(f"http://{pods['frontend-0'].address}:{PORT}")
    worker = pods["worker-0"]
    try:
        expected = chats.run(PROMPT)
        begun: set[int] = set()

        def start(number: int) -> Future[Chat]:
            return chats.start(PROMPT, lambda _: begun.add(number))

        # One on each worker.
        running = [start(number) for number in range(2)]
        wait_until(lambda: len(begun) == 2, "both answers to begin")
        assert worker.stop() == 0
        for each in running:
            chat = each.result(WAIT_S)
            assert (chat.reasoning, chat.answer) == (expected.reasoning, expected.answer)
            assert chat.completion_tokens == expected.completion_tokens
        # The set starts it again, under the same name.
        worker.start()
        wait_until(worker.ready, "worker-0 to be ready again")
        pods["worker-1"].stop()
        assert chats.run(PROMPT).answer == expected.answer
    finally:
        chats.close()
