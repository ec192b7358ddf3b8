"""Run by test_two_hosts.py in namespaces of its own: a fleet on two hosts, made from one file.

The second host is a second network namespace. Both have what `tailrace render processes` gives them, and
nothing else: certificates for their own services, and the file.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import yaml

from examples.fleet import Chat
from tailrace.cli.errors import Unreachable
from tailrace.local.state import RunFolder, RunState
from tailrace.tiny import MODEL_PATH
from tailrace.tiny.task import task
from tests.harness.chats import Chats
from tests.harness.namespaces import ip, prepare, run
from tests.harness.processes import wait_until
from tests.harness.tries import RequestEnded, before_it_ends
from tests.waiting import WAIT_S

A, B, PORT = "10.78.0.1", "10.78.0.2", 8000
LINK, KEY = "hosts0", "none"
PROMPT = task("wxyz", 220, 180).prompt
FLEET = {
    "hosts": {"a": {"address": A}, "b": {"address": B}},
    "etcd": ["a"],
    "control": ["a", "b"],
    "models": [
        {
            "model": str(MODEL_PATH),
            "engine": "simulated",
            "front": "rust",
            "http": f"{A}:{PORT}",
            "flags": {"served-model-name": "tiny", "api-key": KEY, "encrypt-kv": True, "sim": ["speed=0.1"]},
        }
    ],
    "policy": {"name": "least_loaded"},
    "slo": {"ttft": "3s"},
    "tls": True,
}


class Hosts:
    """The folders of both hosts, and commands run there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("TAILRACE_")},
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(map(os.path.abspath, filter(None, sys.path))),
        }

    def run(self, host: str, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in a host's folder and network; host "": where the operator is."""
        inside = ["ip", "netns", "exec", "b"] if host == "b" else []
        return subprocess.run(
            [*inside, *command],
            cwd=self.path / "hosts" / host if host else self.path,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )

    def checked(self, host: str, *command: str) -> str:
        """Return the output of a command that must succeed."""
        result = self.run(host, *command)
        assert result.returncode == 0, f"{shlex.join(command)}: {result.stdout}{result.stderr}"
        return result.stdout

    def state(self, host: str) -> RunState:
        """Return what runs on a host."""
        state = RunFolder(self.path / "hosts" / host / ".run").read()
        assert state is not None
        return state

    def figures(self, *command: str) -> dict[str, list[dict[str, object]]]:
        """Return what a command of the operator prints with `-o json`."""
        loaded: dict[str, list[dict[str, object]]] = json.loads(
            self.checked("a", "tailrace", *command, "-o", "json")
        )
        return loaded


def write(path: Path, fleet: dict[str, object]) -> None:
    path.write_text(yaml.safe_dump(fleet))


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    prepare()
    # UCX looks for its network devices there, and `ip netns exec` does the same.
    run("mount", "-t", "sysfs", "sysfs", "/sys")
    ip("netns", "add", "b")
    ip("link", "add", LINK, "type", "veth", "peer", "name", LINK, "netns", "b")
    for address, where in ((A, []), (B, ["-n", "b"])):
        ip(*where, "address", "add", f"{address}/24", "dev", LINK)
        ip(*where, "link", "set", LINK, "up")
        ip(*where, "link", "set", "lo", "up")
    here = Hosts(tmp_path_factory.mktemp("fleet"))
    write(here.path / "fleet.yaml", FLEET)
    try:
        yield here
    finally:
        for host in ("a", "b"):
            if (here.path / "hosts" / host).exists():
                here.run(host, "tailrace", "down")


def active(hosts: Hosts, *options: str) -> set[object]:
    instances = hosts.figures("get", "instances", *options)["instances"]
    return {each["instance_id"] for each in instances if each["state"] == "active"}


def test_a_fleet_from_one_file(hosts: Hosts) -> None:
    steps = hosts.checked("", "tailrace", "render", "processes", "-f", "fleet.yaml").splitlines()
    assert [step.rpartition(" ssh ")[2] for step in steps] == [
        f"{A} sh tailrace/start.sh",
        f"{B} sh tailrace/start.sh",
    ]
    issued = hosts.path / "hosts/b/tls/issued"
    assert {str(key.parent.relative_to(issued)) for key in issued.glob("*/*/tls.key")} == {
        "admin/local",
        "migration/migration-b",
        "monitor/monitor-b",
        "scheduler/scheduler-b",
        "worker/worker-b-0",
    }
    hosts.checked("a", "sh", "start.sh")
    hosts.checked("b", "sh", "start.sh")
    wait_until(lambda: active(hosts) == {"worker-a-0", "worker-b-0"}, "both workers")
    assert "ttft=3s " in hosts.checked("a", "tailrace", "get", "slo")


def test_a_request_moves_to_the_other_host_which_dies(hosts: Hosts) -> None:
    chats = Chats(f"http://{A}:{PORT}")
    try:
        expected = chats.run(PROMPT)
        running = before_it_ends(lambda: running_on_b(hosts, chats))
        for part in hosts.state("b").parts:
            for pid in part.identity.session_members():
                os.kill(pid, 9)
        chat = running.result(WAIT_S)
        assert (chat.reasoning, chat.answer) == (expected.reasoning, expected.answer)
        assert chat.completion_tokens == expected.completion_tokens
    finally:
        chats.close()


def running_on_b(hosts: Hosts, chats: Chats) -> Future[Chat]:
    """Start an answer and bring it to the second host. Raise RequestEnded if it ends before."""
    running, request = decoding(hosts, chats)
    command = ("tailrace", "migrate", str(request["request_id"]), "--to", "worker-b-0")
    while request["instance_id"] == "worker-a-0":
        result = hosts.run("a", *command)
        if result.returncode == 0:
            break
        if running.done():
            raise RequestEnded("the answer ended before it was moved")
        # For a moment nobody may lead, or the target not report.
        passing = result.returncode == Unreachable.exit_code or "is suspect" in result.stderr
        assert passing, f"{shlex.join(command)}: {result.stdout}{result.stderr}"
        time.sleep(0.5)
    return running


def decoding(hosts: Hosts, chats: Chats) -> tuple[Future[Chat], dict[str, object]]:
    """Start an answer; return it once its request is seen to decode. If it ends before, start it again."""
    running = [chats.start(PROMPT)]
    found: list[dict[str, object]] = []

    def decodes() -> bool:
        if running[0].done():
            running[0].result()
            running[0] = chats.start(PROMPT)
        found[:] = hosts.figures("get", "requests")["requests"]
        return bool(found) and found[0]["phase"] in ("reasoning", "answering")

    wait_until(decodes, "the request to decode")
    return running[0], found[0]
