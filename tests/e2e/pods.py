"""Run by test_pods.py in namespaces of its own: a fleet with TLS on Kubernetes (pod_network.py)."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path

import pytest

from examples.fleet import Chat
from tailrace.tiny.task import task
from tests.e2e.pod_network import (
    MODEL,
    PORT,
    Pod,
    assert_finishes_its_streams,
    assert_probes_pass,
    running_pods,
    seen_connections,
    tailrace,
)
from tests.harness.chats import Chats
from tests.harness.processes import wait_until
from tests.harness.tries import TRIES
from tests.waiting import WAIT_S

PROMPT = task("wxyz", 120, 90).prompt
FLEET = {
    "models": [MODEL],
    "policy": {"name": "least_loaded"},
    "tls": True,
    "schedulers": 2,
    "kubernetes": {"etcd": 1, "drain": 60, "console": "viewer"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pods")


@pytest.fixture(scope="module")
def pods(folder: Path) -> Iterator[dict[str, Pod]]:
    with running_pods(folder, FLEET) as known:
        yield known


def test_a_started_pod_passes_its_probes(pods: dict[str, Pod]) -> None:
    assert_probes_pass(pods)


def test_a_pod_that_is_deleted_hands_its_requests_over(pods: dict[str, Pod], folder: Path) -> None:
    chats = Chats(f"http://{pods['frontend-0'].address}:{PORT}")
    worker = pods["worker-0"]
    try:
        expected = chats.run(PROMPT)
        begun: set[int] = set()

        def start(number: int) -> Future[Chat]:
            return chats.start(PROMPT, lambda _: begun.add(number))

        for _ in range(TRIES):
            begun.clear()
            # One on each worker.
            running = [start(number) for number in range(2)]
            wait_until(lambda: len(begun) == 2, "both answers to begin")
            said = worker.pre_stop()
            assert "worker-0 is empty and gets nothing new" in said
            moves = _committed(folder, pods)
            assert worker.stop() == 0
            for each in running:
                assert each.result(WAIT_S).same_text_and_usage(expected)
            # The set starts it again, under the same name.
            worker.start()
            wait_until(worker.ready, "worker-0 to be ready again")
            # On a busy machine the answers may end before the command has begun.
            if moves:
                break
        assert moves == [("worker-0", "worker-1")]
        # Without the drain of its predecessor: now it is SIGTERM alone that moves requests.
        running = [start(number) for number in range(2, 4)]
        wait_until(lambda: {2, 3} <= begun, "both answers to begin")
        assert pods["worker-1"].stop() == 0
        for each in running:
            assert each.result(WAIT_S).same_text_and_usage(expected)
        assert chats.run(PROMPT).answer == expected.answer
    finally:
        chats.close()


def _committed(folder: Path, pods: Mapping[str, Pod]) -> list[tuple[str, str]]:
    """Return from where to where requests have moved with their KV."""
    admin = ["--admin", f"{pods['scheduler-0'].address}:7101", "--tls", "certs/issued/admin/local"]
    moves = json.loads(tailrace(folder, "get", "migrations", "-o", "json", *admin))["migrations"]
    committed = [each for each in moves if each["state"] == "committed"]
    return [(each["source_instance_id"], each["target_instance_id"]) for each in committed]


def test_policies_allow_the_connections_that_there_are(pods: dict[str, Pod], folder: Path) -> None:
    _read_console(pods["console-0"])
    seen, refused = seen_connections(folder, pods)
    assert not refused
    assert {("frontend", "worker", 7205), ("worker", "monitor", 7102), ("console", "scheduler", 7101)} <= seen


def _read_console(pod: Pod) -> None:
    """Open a page that asks the scheduler; the pod has made the token."""
    token = (pod.folder / "data" / "console.token").read_text().strip()
    url = f"http://{pod.address}:8081/api/policies"
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=WAIT_S) as reply:
        assert "least_loaded" in reply.read().decode()


def test_a_front_end_that_is_deleted_finishes_its_streams(pods: dict[str, Pod]) -> None:
    assert_finishes_its_streams(pods["frontend-0"], PROMPT, begins_late=True)
