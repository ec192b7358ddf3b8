"""The Helm chart of a fleet, by Helm itself."""

from __future__ import annotations

import importlib.util
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tailrace.fleet.chart import chart
from tailrace.fleet.kubernetes import SECRETS
from tests.fleet.files import PODS, changed
from tests.fleet.kubernetes_objects import EXAMPLES, FLEETS, Objects, check, find, fleet, pods, render
from tests.waiting import WAIT_S

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("helm_python") is None, reason="no Helm: pip install helm-python-sdk"
)


def write(folder: Path, objects: Objects) -> Path:
    """Write the chart of objects and return its folder."""
    made = {name: each for name, each in objects.items() if name != "kustomization.yaml"}
    for name, text in chart(made).items():
        (folder / "chart" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "chart" / name).write_text(text)
    return folder / "chart"


def helm(folder: Path, values: Any = None) -> dict[str, Any]:
    """Return what Helm says of a chart with these values, in a file beside it."""
    file = folder.parent / "values.yaml"
    file.write_text(yaml.safe_dump(values or {}))
    command = [sys.executable, "-m", "tests.fleet.helm", str(folder), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said


@pytest.mark.parametrize("name", FLEETS)
def test_the_chart_is_the_same_output(tmp_path: Path, name: str) -> None:
    said = helm(write(tmp_path, fleet(name)), {"monitoring": {"enabled": True}})
    assert said["lint"] == []
    apart = ("kustomization.yaml", "namespace.yaml", SECRETS)
    rendered = {file: each for file, each in fleet(name).items() if file not in apart}
    for each in itertools.chain.from_iterable(said["objects"].values()):
        assert each["metadata"].pop("namespace") == "elsewhere"
    namespace = FLEETS[name].get("kubernetes", {}).get("namespace", "tailrace")
    assert _with_content(said["objects"]) == _with_content(rendered, {"namespace": namespace})


def _with_content(value: Any, without: dict[str, Any] | None = None) -> Any:
    """Return the value without fields that are empty, or the same as in `without`."""
    if isinstance(value, dict):
        kept = {name: _with_content(each, without) for name, each in value.items()}
        return {
            name: each
            for name, each in kept.items()
            if each not in ({}, []) and (without or {}).get(name) != each
        }
    return [_with_content(each, without) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", ["cpu", "gpu", "models", "nodes"])
def test_the_examples_values(tmp_path: Path, name: str) -> None:
    values = yaml.safe_load((EXAMPLES / name / "values.yaml").read_text())
    objects = helm(write(tmp_path, fleet(name)), values)["objects"]
    for each in itertools.chain.from_iterable(objects.values()):
        check(each)
    made = pods(objects)
    for kind in set(values) & set(made):
        (container,) = made[kind]["containers"]
        for field in set(values[kind]) & {"image", "args"}:
            assert container[field] == values[kind][field]
        for field in set(values[kind]) & {"nodeSelector", "tolerations"}:
            assert made[kind][field] == values[kind][field]
    match name:
        case "cpu":
            assert find(objects, "StatefulSet", "worker")["spec"]["replicas"] == 3
            # What the values do not name stays.
            wanted = {"cpu": "2", "memory": "12Gi"}
            assert made["worker"]["containers"][0]["resources"]["requests"] == wanted
            template = find(objects, "Deployment", "frontend")["spec"]["template"]
            assert template["metadata"]["annotations"] == {"example.org/team": "research"}
        case "gpu":
            assert made["scheduler"]["imagePullSecrets"] == [{"name": "registry"}]
            assert find(objects, "ScaledObject", "worker")["spec"]["maxReplicaCount"] == 24
            assert find(objects, "HTTPRoute", "frontend")["spec"]["hostnames"] == ["llm.example.org"]
            assert {"PodMonitor", "PrometheusRule"} <= {each["kind"] for each in objects["monitoring.yaml"]}
        case "models":
            assert find(objects, "StatefulSet", "chat-worker")["spec"]["replicas"] == 3
            assert find(objects, "Deployment", "coder-frontend")["spec"]["replicas"] == 4
            requests = made["vision-worker"]["containers"][0]["resources"]["requests"]
            assert requests == {"cpu": "12", "memory": "48Gi", "nvidia.com/gpu": 1}
            assert find(objects, "Deployment", "edge")["spec"]["replicas"] == 3
            most = {
                each["metadata"]["name"]: each["spec"]["maxReplicaCount"] for each in objects["scaling.yaml"]
            }
            assert most == {"coder-worker": 8, "vision-worker": 4}
            assert find(objects, "HTTPRoute", "edge")["spec"]["hostnames"] == ["llm.example.org"]
            assert find(objects, "Service", "edge")["spec"]["type"] == "ClusterIP"
        case "nodes":
            assert find(objects, "LeaderWorkerSet", "worker")["spec"]["replicas"] == 3
            assert find(objects, "Service", "frontend")["spec"]["type"] == "NodePort"
            assert not objects.get("monitoring.yaml")


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"worker": {"imag": "x"}}, "at '/worker': additional properties 'imag' not allowed"),
        ({"worker": {"replicas": -1}}, "at '/worker/replicas': minimum: got -1, want 0"),
        ({"frontend": {"args": "--x"}}, "at '/frontend/args': got string, want array"),
        ({"etcd": {"replicas": 5}}, "at '/etcd': additional properties 'replicas' not allowed"),
    ],
)
def test_a_wrong_value_is_named(tmp_path: Path, values: Any, named: str) -> None:
    assert named in helm(write(tmp_path, fleet("usual")), values)["error"]


def test_secrets_stay_beside_the_chart(tmp_path: Path) -> None:
    folder = write(tmp_path, fleet("usual"))
    assert (folder / SECRETS).exists()
    assert SECRETS in (folder / ".helmignore").read_text().split()
    assert "Secret" not in {
        each["kind"] for each in itertools.chain.from_iterable(helm(folder)["objects"].values())
    }


def test_what_looks_like_a_template_is_text(tmp_path: Path) -> None:
    text = "{{ .Values.worker }} {{`x`}} {{- end }} '\"\n{%- if x %}" + 40 * "{{ long }} "
    made = render(changed(PODS, "models.0.flags.chat-template", text))
    container = pods(helm(write(tmp_path, made))["objects"])["worker"]["containers"][0]
    assert text in container["command"]
