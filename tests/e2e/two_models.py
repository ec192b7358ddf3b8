"""Run by test_two_hosts.py in namespaces of its own: two models on two hosts behind an edge, from one file.

The edge is on one host, one model's front end on each. With certificates and users' keys.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tailrace.tiny import MODEL_PATH
from tests.e2e.two_hosts import A, B, Hosts, active, hosts, write
from tests.harness.processes import wait_until
from tests.waiting import WAIT_S

__all__ = ["hosts"]

PORT, BEHIND = 8000, 8101
SIMULATED = {"engine": "simulated", "replicas": 2}


@pytest.fixture(scope="module")
def key(hosts: Hosts) -> Iterator[str]:
    """Start the fleet; return the key of a user."""
    # Other weights, so that nobody takes one model for the other.
    other = Path(shutil.copytree(MODEL_PATH, hosts.path / "other"))
    (other / "model.safetensors").unlink()
    first = {"model": str(MODEL_PATH), "flags": {"served-model-name": "first"}, "frontends": {"a": 1}}
    second = {
        "model": str(other),
        "flags": {"served-model-name": "second", "sim": ["weights_seed=1"]},
        "frontends": {"b": 1},
    }
    fleet = {
        "hosts": {"a": {"address": A}, "b": {"address": B}},
        "etcd": ["a"],
        "http": f"0.0.0.0:{PORT}",
        "models": [{**first, **SIMULATED}, {**second, **SIMULATED}],
        "policy": {"name": "least_loaded"},
        "keys": "keys.json",
        "tls": True,
    }
    write(hosts.path / "fleet.yaml", fleet)
    made = hosts.checked("", "tailrace", "keys", "make", "team", "--file", "keys.json")
    hosts.checked("", "tailrace", "render", "processes", "-f", "fleet.yaml")
    hosts.checked("a", "sh", "start.sh")
    hosts.checked("b", "sh", "start.sh")
    expected = {f"{model}-worker-{host}-0" for model in ("first", "second") for host in ("a", "b")}
    wait_until(lambda: active(hosts) == expected, "all workers")
    yield next(word for word in made.split() if word.startswith("sk-"))


def ask(model: str, key: str = "") -> tuple[int, object]:
    """Return status and answer of a request to the edge."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    body = {"model": model, "prompt": "hello", "max_tokens": 8, "temperature": 0}
    reply = httpx.post(f"http://{A}:{PORT}/v1/completions", json=body, headers=headers, timeout=WAIT_S)
    return reply.status_code, reply.json()


def test_each_model_answers_at_one_address(key: str) -> None:
    texts = {}
    for model in ("first", "second"):
        wait_until(lambda: ask(model, key)[0] == 200, f"{model} to answer")  # noqa: B023
        _, reply = ask(model, key)
        assert isinstance(reply, dict) and reply["model"] == model
        texts[model] = reply["choices"][0]["text"]
    assert texts["first"] != texts["second"]


def test_nobody_without_a_key(key: str) -> None:
    assert ask("first")[0] == 401
    assert ask("second", f"{key}x")[0] == 401


@pytest.mark.parametrize("address", [A, B])
def test_a_front_end_takes_edges_alone(key: str, address: str) -> None:
    """Not even with a user's key: it asks for a certificate."""
    context = ssl._create_unverified_context()
    refusals = (ssl.SSLError, ConnectionError)
    request = f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n\r\n".encode()
    with socket.create_connection((address, BEHIND), timeout=WAIT_S) as plain:
        plain.sendall(request)
        assert not plain.recv(100)
    with (
        socket.create_connection((address, BEHIND), timeout=WAIT_S) as plain,
        contextlib.suppress(*refusals),
        context.wrap_socket(plain) as stranger,
    ):
        stranger.sendall(request)
        assert not stranger.recv(100)


def test_the_file_is_what_runs(hosts: Hosts, key: str) -> None:
    shown = hosts.checked("a", "tailrace", "apply", "-f", "fleet.yaml", "--on", "a", "--dry-run")
    assert "nothing to change" in shown
