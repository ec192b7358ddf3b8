"""Run by test_pods.py in namespaces of its own: what `tailrace render kubernetes` makes,
run as Kubernetes does.

A pod is a network namespace with an address, and its volumes are folders; its containers' commands,
environment, probes and preStop run as they are written. The network policies are compared with the
connections that there are.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import urllib.request
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
    "schedulers": 2,
    "kubernetes": {"etcd": 1, "drain": 60, "console": "viewer"},
}
Secrets = Mapping[str, Mapping[str, bytes]]
ESTABLISHED, LISTENING = "01", "0A"


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

    def mount(self, secrets: Secrets) -> None:
        """Make its volumes."""
        for volume in self.spec["volumes"]:
            path = self.folder / volume["name"]
            path.mkdir(parents=True, exist_ok=True)
            projected = volume.get("projected", {"sources": []})
            for secret in [source["secret"] for source in projected["sources"]]:
                for item in secret["items"]:
                    file = path / item["path"]
                    file.parent.mkdir(exist_ok=True)
                    file.write_bytes(secrets[secret["name"]][item["key"]])
                    file.chmod(projected["defaultMode"])
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
        given |= {"POD_NAME": self.name, "POD_IP": self.address}
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
        """Run the readiness probe; the pod must be alive."""
        assert self.process is not None and self.process.poll() is None, self.log()
        return self.probe("readinessProbe")

    def log(self) -> str:
        """Return what the container has printed."""
        return (self.folder / "log").read_text()

    def probe(self, name: str) -> bool:
        """Run a probe; commands in the container, others from the machine as the kubelet does."""
        match self.container[name]:
            case {"exec": {"command": command}}:
                done = self._do(command)
                return done.returncode == 0
            case {"tcpSocket": {"port": port}}:
                return _connects(self.address, port)
            case {"httpGet": {"path": path, "port": port}}:
                return _answers(f"http://{self.address}:{port}{path}")
            case other:
                raise AssertionError(other)

    def _do(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self._run(command), env=self.environment(), capture_output=True, text=True, timeout=WAIT_S
        )

    def pre_stop(self) -> str:
        """Run the preStop, if there is one, and return what it has said."""
        if "lifecycle" not in self.container:
            return ""
        done = self._do(self.container["lifecycle"]["preStop"]["exec"]["command"])
        assert done.returncode == 0, done.stderr
        return done.stdout

    def stop(self) -> int:
        """Stop the container as Kubernetes does after a preStop; return its exit code. Raise
        TimeoutExpired."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(self.spec["terminationGracePeriodSeconds"])

    def connections(self) -> Iterator[tuple[str, int]]:
        """Yield from which addresses others are connected to which of its ports."""
        table = subprocess.run(
            ["ip", "netns", "exec", self.name, "cat", "/proc/net/tcp", "/proc/net/tcp6"],
            capture_output=True,
            text=True,
            check=True,
            timeout=WAIT_S,
        )
        rows = [line.split()[1:4] for line in table.stdout.splitlines()]
        listening = {own.partition(":")[2] for own, _, state in rows if state == LISTENING}
        for own, peer, state in rows:
            port = own.partition(":")[2]
            if state == ESTABLISHED and port in listening:
                # The last four bytes are the address of IPv4, in IPv6 as well.
                last = bytes.fromhex(peer.partition(":")[0][-8:])
                yield ".".join(map(str, reversed(last))), int(port, 16)


def _connects(address: str, port: int) -> bool:
    try:
        with socket.create_connection((address, port), WAIT_S):
            return True
    except OSError:
        return False


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=WAIT_S) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Render the fleet's objects into kubernetes/ and its certificates into certs/."""
    folder = tmp_path_factory.mktemp("pods")
    (folder / "fleet.yaml").write_text(yaml.safe_dump(FLEET))
    _tailrace(folder, "render", "kubernetes", "-f", "fleet.yaml")
    return folder


def _tailrace(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "tailrace", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _objects(folder: Path, *names: str) -> list[dict[str, Any]]:
    return [each for name in names for each in yaml.safe_load_all((folder / "kubernetes" / name).read_text())]


@pytest.fixture(scope="module")
def pods(folder: Path) -> Iterator[dict[str, Pod]]:
    prepare()
    # UCX looks for its network devices there, and `ip netns exec` does the same.
    run("mount", "-t", "sysfs", "sysfs", "/sys")
    objects = _objects(folder, "fleet.yaml", "secrets.yaml")
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
    for path in ("tailrace/tls", "tailrace/operator"):
        (etc / path).mkdir(parents=True, exist_ok=True)
    lines = ["127.0.0.1 localhost"]
    for name, pod in pods.items():
        service = name.rpartition("-")[0]
        lines.append(f"{pod.address} {name}.{service} {service}")
    (etc / "hosts").unlink()
    (etc / "hosts").write_text("\n".join([*lines, ""]))
    run("mount", "--bind", str(etc), "/etc")
    run("mount", "-t", "tmpfs", "tmpfs", "/var/lib")
    for path in ("tailrace", "etcd"):
        Path("/var/lib", path).mkdir()


def test_a_started_pod_passes_its_probes(pods: dict[str, Pod]) -> None:
    for pod in pods.values():
        for name in {"startupProbe", "readinessProbe", "livenessProbe"} & set(pod.container):
            wait_until(lambda pod=pod, name=name: pod.probe(name), f"{name} of {pod.name}")  # type: ignore[misc]


def test_a_pod_that_is_deleted_hands_its_requests_over(pods: dict[str, Pod], folder: Path) -> None:
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
        said = worker.pre_stop()
        assert "worker-0 is empty and gets nothing new" in said
        assert _committed(folder, pods) == [("worker-0", "worker-1")]
        assert worker.stop() == 0
        for each in running:
            _assert_same(each.result(WAIT_S), expected)
        # The set starts it again, under the same name.
        worker.start()
        wait_until(worker.ready, "worker-0 to be ready again")
        # Without the drain of its predecessor: now it is SIGTERM alone that moves requests.
        running = [start(number) for number in range(2, 4)]
        wait_until(lambda: {2, 3} <= begun, "both answers to begin")
        assert pods["worker-1"].stop() == 0
        for each in running:
            _assert_same(each.result(WAIT_S), expected)
        assert chats.run(PROMPT).answer == expected.answer
    finally:
        chats.close()


def _assert_same(chat: Chat, expected: Chat) -> None:
    assert (chat.reasoning, chat.answer) == (expected.reasoning, expected.answer)
    assert chat.completion_tokens == expected.completion_tokens


def _committed(folder: Path, pods: Mapping[str, Pod]) -> list[tuple[str, str]]:
    """Return from where to where requests have moved with their KV."""
    admin = ["--admin", f"{pods['scheduler-0'].address}:7101", "--tls", "certs/issued/admin/local"]
    moves = json.loads(_tailrace(folder, "get", "migrations", "-o", "json", *admin))["migrations"]
    committed = [each for each in moves if each["state"] == "committed"]
    return [(each["source_instance_id"], each["target_instance_id"]) for each in committed]


def test_policies_allow_the_connections_that_there_are(pods: dict[str, Pod], folder: Path) -> None:
    kinds = {pod.address: name.rpartition("-")[0] for name, pod in pods.items()}
    policies = {
        each["metadata"]["name"]: each["spec"]["ingress"] for each in _objects(folder, "network.yaml")
    }
    _read_console(pods["console-0"])
    seen = set()
    for pod in pods.values():
        for peer, port in pod.connections():
            if peer in kinds and peer != pod.address:
                seen.add((kinds[peer], kinds[pod.address], port))
    refused = {
        each
        for each in seen
        if not any(_allows(rule, kind=each[0], port=each[2]) for rule in policies[each[1]])
    }
    assert not refused
    assert {("frontend", "worker", 7205), ("worker", "monitor", 7102), ("console", "scheduler", 7101)} <= seen


def _read_console(pod: Pod) -> None:
    """Open a page that asks the scheduler; the pod has made the token."""
    token = (pod.folder / "data" / "console.token").read_text().strip()
    url = f"http://{pod.address}:8081/api/policies"
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=WAIT_S) as reply:
        assert "least_loaded" in reply.read().decode()


def _allows(rule: Mapping[str, Any], kind: str, port: int) -> bool:
    selectors = [each["podSelector"]["matchExpressions"][0]["values"] for each in rule.get("from", [])]
    ports = rule.get("ports", [])
    from_it = not selectors or kind in itertools.chain.from_iterable(selectors)
    return from_it and any(each["port"] <= port <= each.get("endPort", each["port"]) for each in ports)


def test_a_front_end_that_is_deleted_finishes_its_streams(pods: dict[str, Pod]) -> None:
    front_end = pods["frontend-0"]
    chats = Chats(f"http://{front_end.address}:{PORT}")
    try:
        expected = chats.run(PROMPT)
        begun: list[Chat] = []
        running = chats.start(PROMPT, begun.append)
        wait_until(lambda: bool(begun), "the answer to begin")
        # Until the endpoints are gone everywhere, connections still come, and are served.
        front_end.pre_stop()
        assert front_end.ready()
        late = chats.start(PROMPT, begun.append)
        count = len(begun)
        wait_until(lambda: len(begun) > count and not late.done(), "the late answer to begin")
        assert front_end.stop() == 0
        _assert_same(running.result(WAIT_S), expected)
        _assert_same(late.result(WAIT_S), expected)
    finally:
        chats.close()
