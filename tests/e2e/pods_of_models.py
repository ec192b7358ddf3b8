"""Run by test_pods.py in namespaces of its own: two models behind an edge on Kubernetes (pod_network.py).

The second model has a policy of its own.
"""

from __future__ import annotations

import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tailrace.tiny import MODEL_PATH
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
from tests.harness.processes import wait_until
from tests.waiting import WAIT_S

PROMPT = task("wxyz", 120, 90).prompt
BEHIND = 8101


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def key(folder: Path) -> str:
    """Return the key of a user."""
    return tailrace(folder, "keys", "make", "users").strip()


@pytest.fixture(scope="module")
def pods(folder: Path, key: str) -> Iterator[dict[str, Pod]]:
    # Other weights, so that nobody takes one model for the other.
    other = Path(shutil.copytree(MODEL_PATH, folder / "other"))
    (other / "model.safetensors").unlink()
    common = {name: MODEL[name] for name in ("engine", "front")} | {"replicas": 1}
    fleet = {
        "http": f"0.0.0.0:{PORT}",
        "models": [
            {
                "model": str(MODEL_PATH),
                "flags": {"served-model-name": "tiny", "sim": ["speed=0.4"]},
                **common,
            },
            {
                "model": str(other),
                "flags": {"served-model-name": "other", "sim": ["weights_seed=1"]},
                "policy": {"name": "arrow"},
                **common,
            },
        ],
        "policy": {"name": "tailrace"},
        "tls": True,
        "keys": "keys.json",
        "kubernetes": {"etcd": 1},
    }
    with running_pods(folder, fleet) as known:
        yield known


def ask(pods: dict[str, Pod], key: str, model: str) -> tuple[int, object]:
    """Return status and answer of a request to the edge."""
    body = {"model": model, "prompt": "hello", "max_tokens": 8, "temperature": 0}
    url = f"http://{pods['edge-0'].address}:{PORT}/v1/completions"
    reply = httpx.post(url, json=body, headers={"authorization": f"Bearer {key}"}, timeout=WAIT_S)
    return reply.status_code, reply.json()


def test_a_started_pod_passes_its_probes(pods: dict[str, Pod]) -> None:
    assert {"edge-0", "tiny-worker-0", "other-frontend-0", "other-scheduler-0"} <= set(pods)
    assert_probes_pass(pods)


def test_the_edge_serves_both_models(pods: dict[str, Pod], key: str) -> None:
    texts = {}
    for model in ("tiny", "other"):
        wait_until(lambda: ask(pods, key, model)[0] == 200, f"{model} to answer")  # noqa: B023
        _, reply = ask(pods, key, model)
        assert isinstance(reply, dict) and reply["model"] == model
        texts[model] = reply["choices"][0]["text"]
    assert texts["tiny"] != texts["other"]
    assert ask(pods, key, "none")[0] == 404
    # A front end takes edges alone.
    with pytest.raises((OSError, httpx.HTTPError)):
        urllib.request.urlopen(f"http://{pods['tiny-frontend-0'].address}:{BEHIND}/v1/models", timeout=WAIT_S)


def test_each_cluster_has_its_own_policy(pods: dict[str, Pod], folder: Path) -> None:
    def apply(scheduler: str, *options: str) -> list[str]:
        admin = ("--admin", f"{pods[scheduler].address}:7101", "--tls", "certs/issued/admin/local")
        return tailrace(folder, "apply", "-f", "fleet.yaml", "--yes", *admin, *options).splitlines()

    assert apply("scheduler-0") == ["policy  least_loaded -> tailrace", "applied"]
    shown = apply("other-scheduler-0", "--model", "other")
    assert shown == ["policy of other  least_loaded -> arrow", "applied"]
    unchanged = ["nothing to change: the cluster is as the file says"]
    assert apply("scheduler-0") == apply("other-scheduler-0", "--model", "other") == unchanged


def test_policies_allow_the_connections_that_there_are(pods: dict[str, Pod], folder: Path, key: str) -> None:
    for model in ("tiny", "other"):
        assert ask(pods, key, model)[0] == 200
    seen, refused = seen_connections(folder, pods)
    assert not refused
    assert {
        ("edge", "etcd", 2379),
        ("edge", "tiny-frontend", BEHIND),
        ("edge", "other-frontend", BEHIND),
        ("tiny-frontend", "tiny-worker", 7205),
        ("other-frontend", "other-worker", 7205),
        ("tiny-worker", "monitor", 7102),
        ("other-worker", "other-monitor", 7102),
    } <= seen


def test_an_edge_that_is_deleted_finishes_its_streams(pods: dict[str, Pod], key: str) -> None:
    assert_finishes_its_streams(pods["edge-0"], PROMPT, begins_late=False, key=key)
