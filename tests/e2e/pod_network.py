"""What `tailrace render kubernetes` makes, run as Kubernetes does, in namespaces of this process's own.

A pod is a network namespace with an address, and its volumes are folders; its containers' commands,
environment, probes and preStop run as they are written.
"""

from __future__ import annotations

import base64
import itertools
import os
import shlex
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tailrace.service.etcd import find_etcd
from tailrace.service.probe import Unhealthy, check_grpc
from tailrace.tiny import MODEL_PATH
from tests.harness.chats import Chats
from tests.harness.namespaces import ip, prepare, run
from tests.harness.processes import wait_until
from tests.harness.tries import TRIES
from tests.waiting import WAIT_S

NETWORK, PORT = "10.79.0", 8000
MODEL = {
    "model": str(MODEL_PATH),
    "engine": "simulated",
    "front": "rust",
    "http": f"0.0.0.0:{PORT}",
    "replicas": 2,
    "flags": {"served-model-name": "tiny", "api-key": "none", "encrypt-kv": True, "sim": ["speed=0.4"]},
}
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

    def mount(self, secrets: Mapping[str, Mapping[str, bytes]]) -> None:
        """Make its volumes."""
        for volume in self.spec["volumes"]:
            path = self.folder / volume["name"]
            path.mkdir(parents=True, exist_ok=True)
            if whole := volume.get("secret"):
                for name, content in secrets[whole["secretName"]].items():
                    (path / name).write_bytes(content)
                    (path / name).chmod(whole["defaultMode"])
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
        return {**_own_environment(), **given, "PATH": programs}

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
            case {"grpc": {"port": port}}:
                return _serves(f"{self.address}:{port}")
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


def _own_environment() -> dict[str, str]:
    """Return this process's environment, in which others import the same modules from any folder."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("TAILRACE_")}
    return {**own, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, filter(None, sys.path)))}


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


def _serves(address: str) -> bool:
    try:
        check_grpc(address, "", WAIT_S)
    except Unhealthy:
        return False
    return True


def tailrace(folder: Path, *arguments: str) -> str:
    """Run a command there and return what it prints."""
    command = [sys.executable, "-m", "tailrace", *arguments]
    done = subprocess.run(
        command, cwd=folder, env=_own_environment(), capture_output=True, text=True, timeout=WAIT_S
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def objects(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return the objects in a file; none if there is no such file."""
    file = folder / "kubernetes" / name
    return [*yaml.safe_load_all(file.read_text())] if file.exists() else []


@contextmanager
def rendered_pods(folder: Path, fleet: Mapping[str, Any]) -> Iterator[dict[str, Pod]]:
    """Render a fleet's objects into kubernetes/ and its certificates into certs/; make its pods, by name, and
    end them at the end. None is started."""
    (folder / "fleet.yaml").write_text(yaml.safe_dump(dict(fleet)))
    tailrace(folder, "render", "kubernetes", "-f", "fleet.yaml")
    secrets = {
        each["metadata"]["name"]: {
            **{key: base64.b64decode(text) for key, text in each.get("data", {}).items()},
            **{key: text.encode() for key, text in each.get("stringData", {}).items()},
        }
        for each in objects(folder, "secrets.yaml")
    }
    prepare()
    # UCX looks for its network devices there, and `ip netns exec` does the same.
    run("mount", "-t", "sysfs", "sysfs", "/sys")
    ip("link", "add", "bridge0", "type", "bridge")
    ip("address", "add", f"{NETWORK}.254/24", "dev", "bridge0")
    ip("link", "set", "bridge0", "up")
    known: dict[str, Pod] = {}
    for each in objects(folder, "fleet.yaml"):
        if each["kind"] in ("StatefulSet", "Deployment"):
            for number in range(each["spec"]["replicas"]):
                name = f"{each['metadata']['name']}-{number}"
                known[name] = Pod(folder, name, len(known) + 1, each["spec"]["template"]["spec"])
                known[name].mount(secrets)
    _mount_names(folder, known)
    try:
        yield known
    finally:
        for pod in known.values():
            if pod.process is not None:
                pod.process.kill()
                pod.process.wait()


@contextmanager
def running_pods(folder: Path, fleet: Mapping[str, Any]) -> Iterator[dict[str, Pod]]:
    """Run all pods of a fleet for the block, once they are ready."""
    with rendered_pods(folder, fleet) as pods:
        for pod in pods.values():
            pod.start()
        for pod in pods.values():
            wait_until(pod.ready, f"{pod.name} to be ready")
        yield pods


def assert_probes_pass(pods: Mapping[str, Pod]) -> None:
    """Wait until every probe of these pods passes."""
    for pod in pods.values():
        for name in {"startupProbe", "readinessProbe", "livenessProbe"} & set(pod.container):
            wait_until(lambda pod=pod, name=name: pod.probe(name), f"{name} of {pod.name}")  # type: ignore[misc]


def assert_finishes_its_streams(pod: Pod, prompt: str, begins_late: bool, key: str = "none") -> None:
    """Delete a pod that users reach: a stream that runs goes on to its end, and so does one that begins as
    long as the pod's address is still known (`begins_late`)."""
    chats = Chats(f"http://{pod.address}:{PORT}", key=key)
    try:
        expected = chats.run(prompt)
        running = [chats.begin(prompt)[0]]
        # Until the endpoints are gone everywhere, connections still come, and are served.
        pod.pre_stop()
        assert pod.ready()
        if begins_late:
            # It may end at once on a busy machine; then the next one.
            for _ in range(TRIES):
                late, _ = chats.begin(prompt)
                running.append(late)
                if not late.done():
                    break
            else:
                pytest.fail(f"each of {TRIES} streams ended at once")
        assert pod.stop() == 0
        assert all(each.result(WAIT_S).same_text_and_usage(expected) for each in running)
    finally:
        chats.close()


def seen_connections(
    folder: Path, pods: Mapping[str, Pod]
) -> tuple[set[tuple[str, str, int]], set[tuple[str, str, int]]]:
    """Return which kinds of pods are connected to which port of which others, and those connections that the
    network policies do not allow."""
    kinds = {pod.address: name.rpartition("-")[0] for name, pod in pods.items()}
    policies = {each["metadata"]["name"]: each["spec"]["ingress"] for each in objects(folder, "network.yaml")}
    seen = {
        (kinds[peer], kinds[pod.address], port)
        for pod in pods.values()
        for peer, port in pod.connections()
        if peer in kinds and peer != pod.address
    }
    allowed = {
        each for each in seen if any(_allows(rule, kind=each[0], port=each[2]) for rule in policies[each[1]])
    }
    return seen, seen - allowed


def _allows(rule: Mapping[str, Any], kind: str, port: int) -> bool:
    selectors = [each["podSelector"]["matchExpressions"][0]["values"] for each in rule.get("from", [])]
    ports = rule.get("ports", [])
    from_it = not selectors or kind in itertools.chain.from_iterable(selectors)
    return from_it and any(each["port"] <= port <= each.get("endPort", each["port"]) for each in ports)


def _mount_names(folder: Path, pods: Mapping[str, Pod]) -> None:
    """Give the pods their names, and the folders into which volumes are mounted, in this mount namespace."""
    etc = folder / "etc"
    run("cp", "-a", "/etc", str(etc))
    for path in ("tailrace/tls", "tailrace/operator", "tailrace/keys"):
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
