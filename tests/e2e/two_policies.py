"""Run by test_two_hosts.py in namespaces of its own: two models on two hosts, one with a policy of its own.

The control services, of both clusters, and the edge are on one host, the model's front end on the other.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tailrace.tiny import MODEL_PATH
from tests.e2e.two_hosts import A, B, Hosts, active, hosts, write
from tests.e2e.two_models import PORT, SIMULATED, ask
from tests.fleet.files import changed
from tests.harness.processes import wait_until

__all__ = ["hosts"]

OPERATOR = ("--tls", "certs/issued/admin/local")


@pytest.fixture(scope="module")
def models(hosts: Hosts) -> tuple[str, str]:
    """Make the folders of two models; users know them by these, so that vLLM has no flags to check."""
    first, second = (Path(shutil.copytree(MODEL_PATH, hosts.path / name)) for name in ("first", "second"))
    (second / "model.safetensors").unlink()
    return str(first), str(second)


@pytest.fixture(scope="module")
def key(hosts: Hosts) -> str:
    """Return the key of a user."""
    made = hosts.checked("", "tailrace", "keys", "make", "team", "--file", "keys.json")
    return next(word for word in made.split() if word.startswith("sk-"))


@pytest.fixture(scope="module")
def fleet(hosts: Hosts, models: tuple[str, str], key: str) -> dict[str, object]:
    """Start the fleet; return its file."""
    common = {**SIMULATED, "front": "rust"}
    first = {"model": models[0], "frontends": {"a": 1}}
    second = {
        "model": models[1],
        "flags": {"sim": ["weights_seed=1"]},
        "frontends": {"b": 1},
        "policy": {"name": "arrow"},
        "slo": {"ttft": "3s"},
    }
    content: dict[str, object] = {
        "hosts": {"a": {"address": A}, "b": {"address": B}},
        "etcd": ["a"],
        "http": f"0.0.0.0:{PORT}",
        "models": [{**first, **common}, {**second, **common}],
        "policy": {"name": "least_loaded"},
        "tls": True,
        "keys": "keys.json",
    }
    write(hosts.path / "fleet.yaml", content)
    hosts.checked("", "tailrace", "render", "processes", "-f", "fleet.yaml")
    hosts.checked("a", "sh", "start.sh")
    hosts.checked("b", "sh", "start.sh")
    return content


def policy(hosts: Hosts, host: str, model: str) -> list[object]:
    command = ("tailrace", "get", "policies", "--model", model, "-o", "json")
    return [each["name"] for each in json.loads(hosts.checked(host, *command))["policies"] if each["active"]]


def test_each_model_answers_by_its_own_policy(
    hosts: Hosts, models: tuple[str, str], fleet: dict[str, object], key: str
) -> None:
    first, second = models
    for model in models:
        expected = {f"{Path(model).name}-worker-{host}-0" for host in ("a", "b")}
        wait_until(lambda: active(hosts, "--model", model) == expected, "both workers")  # noqa: B023
        wait_until(lambda: ask(model, key)[0] == 200, f"{model} to answer")  # noqa: B023
    # Also where no scheduler runs.
    for host in ("a", "b"):
        assert policy(hosts, host, first) == ["least_loaded"]
        assert policy(hosts, host, second) == ["arrow"]
    assert "ttft=3s " in hosts.checked("b", "tailrace", "get", "slo", "--model", second)


def test_the_file_is_what_runs(hosts: Hosts, fleet: dict[str, object]) -> None:
    for host in ("a", "b"):
        shown = hosts.checked(host, "tailrace", "apply", "-f", "fleet.yaml", "--on", host, "--dry-run")
        assert "nothing to change" in shown
    shown = hosts.checked("", "tailrace", "apply", "-f", "fleet.yaml", "--dry-run", *OPERATOR)
    assert "nothing to change" in shown


def test_a_policy_of_its_own_is_changed(
    hosts: Hosts, models: tuple[str, str], fleet: dict[str, object]
) -> None:
    first, second = models
    write(hosts.path / "fleet.yaml", changed(fleet, "models.1.policy.name", "pascal"))
    shown = hosts.checked("", "tailrace", "apply", "-f", "fleet.yaml", "--yes", *OPERATOR)
    assert shown.splitlines() == [f"policy of {second}  arrow -> pascal", "applied"]
    assert policy(hosts, "a", first) == ["least_loaded"] and policy(hosts, "a", second) == ["pascal"]
    found = hosts.run("", "tailrace", "doctor", "-f", "fleet.yaml", "--on", "a", *OPERATOR).stdout
    assert f"{second}: policy: pascal" in found and f"{second}: instances: 2" in found
