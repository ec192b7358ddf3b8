"""The objects of a fleet on Kubernetes."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_validate import latest_version, validate

from tailrace.cli.fleet_file import common_options
from tailrace.fleet.file import FleetError
from tailrace.fleet.kubernetes import OPTIONAL, files, identities
from tests.deploy.services import longest_s, parse_serve
from tests.fleet.files import MODEL, PODS, changed, read

# A small one without TLS and GPUs, and a large one with everything.
SMALL = {
    "models": [{**MODEL, "replicas": 1, "http": "0.0.0.0:8000", "engine": "simulated"}],
    "insecure": True,
    "kubernetes": {"etcd": 1},
}
LARGE = {
    **changed(PODS, "models.0.flags.tensor-parallel-size", 2),
    "cluster": "large",
    "kubernetes": {
        "namespace": "llm",
        "registry": "registry.example/llm",
        "etcd": ["etcd.example:2379"],
        "rdma": "rdma/hca",
        "models": "models",
        "service": "LoadBalancer",
        "gateway": "web",
        "scale_to": 16,
        "prometheus": "https://prometheus.example",
    },
}
ALERTS = "groups: [{name: one, rules: [{alert: A, expr: up == 0}]}]"


def render(folder: Path, content: Any) -> dict[str, list[dict[str, Any]]]:
    """Return the objects by file."""
    file, options = read(folder, content, common_options)
    paths = {path: b"secret" for name in ("ca.crt", "tls.crt", "tls.key") for path in (name, f"etcd/{name}")}
    certificates = dict.fromkeys(identities(file.fleet), paths)
    texts = files(file.fleet, options, certificates, '{"keys": []}', ALERTS)
    return {name: [*yaml.safe_load_all(text)] for name, text in texts.items()}


def find(objects: dict[str, list[dict[str, Any]]], kind: str, name: str) -> dict[str, Any]:
    (found,) = [
        each
        for documents in objects.values()
        for each in documents
        if each["kind"] == kind and each["metadata"]["name"] == name
    ]
    return found


def pods(objects: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return the specification of each kind's pods."""
    return {
        each["metadata"]["name"]: each["spec"]["template"]["spec"]
        for each in objects["fleet.yaml"]
        if "template" in each["spec"]
    }


@pytest.mark.parametrize("content", [PODS, SMALL, LARGE], ids=["usual", "small", "large"])
def test_kubernetes_accepts_the_objects(tmp_path: Path, content: Any) -> None:
    objects = render(tmp_path, content)
    known = [name for name in objects if name not in (*OPTIONAL, "kustomization.yaml")]
    assert objects["kustomization.yaml"][0]["resources"] == known
    for name in known:
        for each in objects[name]:
            validate(each, latest_version(), strict=True)


@pytest.mark.parametrize("content", [PODS, SMALL, LARGE], ids=["usual", "small", "large"])
def test_pods_run_what_services_take(tmp_path: Path, content: Any) -> None:
    objects = render(tmp_path, content)
    secrets = {each["metadata"]["name"]: each for each in objects.get("secrets.yaml", [])}
    for kind, spec in pods(objects).items():
        (container,) = spec["containers"]
        assert (
            container["securityContext"]["readOnlyRootFilesystem"] and spec["securityContext"]["runAsNonRoot"]
        )
        assert "readinessProbe" in container
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        claims = {"etcd"} if kind == "etcd" else set()
        assert mounted == {volume["name"] for volume in spec["volumes"]} | claims
        for volume in spec["volumes"]:
            if secret := volume.get("secret"):
                known = secrets[secret["secretName"]]
                keys = {**known.get("data", {}), **known.get("stringData", {})}
                assert {item["key"] for item in secret.get("items", [])} <= set(keys)
        if kind != "etcd":
            parse_serve(container["command"][2:])
            assert spec["terminationGracePeriodSeconds"] > longest_s(kind)
            ports = {port["name"]: port["containerPort"] for port in container["ports"]}
            assert f"0.0.0.0:{ports['grpc']}" in container["command"]
            assert f"0.0.0.0:{ports['metrics']}" in container["command"]


def test_an_instance_has_its_gpus(tmp_path: Path) -> None:
    def devices(content: Any) -> dict[str, Any]:
        limits = pods(render(tmp_path, content))["worker"]["containers"][0]["resources"]["limits"]
        return {name: count for name, count in limits.items() if name != "memory"}

    assert devices(PODS) == {"nvidia.com/gpu": 1}
    assert devices(LARGE) == {"nvidia.com/gpu": 2, "rdma/hca": 1}
    assert devices(changed(PODS, "kubernetes.gpus", 0)) == {}
    assert devices(SMALL) == {}


def test_pods_of_a_kind_share_a_certificate(tmp_path: Path) -> None:
    objects = render(tmp_path, PODS)
    secret = find(objects, "Secret", "tls-worker")
    assert base64.b64decode(secret["data"]["etcd-tls.key"]) == b"secret"
    mount = next(each for each in pods(objects)["worker"]["volumes"] if each["name"] == "tls")
    assert {"key": "etcd-tls.key", "path": "etcd/tls.key"} in mount["secret"]["items"]
    assert find(objects, "Secret", "keys")["stringData"] == {"keys.json": '{"keys": []}'}
    # Only Prometheus's certificate, and no operator's, is beside the services'.
    names = {each["metadata"]["name"] for each in objects["secrets.yaml"]}
    kinds = ("etcd", "frontend", "migration", "monitor", "scheduler", "telemetry", "worker")
    assert names == {"keys", *(f"tls-{kind}" for kind in kinds)}


def test_what_others_read(tmp_path: Path) -> None:
    objects = render(tmp_path, LARGE)
    scaled = find(objects, "ScaledObject", "worker")["spec"]
    assert (scaled["minReplicaCount"], scaled["maxReplicaCount"]) == (4, 16)
    assert 'model="org/model"' in scaled["triggers"][0]["metadata"]["query"]
    assert find(objects, "HTTPRoute", "frontend")["spec"]["parentRefs"] == [{"name": "web"}]
    assert find(objects, "PrometheusRule", "alerts")["spec"] == yaml.safe_load(ALERTS)
    endpoint = find(objects, "PodMonitor", "worker")["spec"]["podMetricsEndpoints"][0]
    assert endpoint["tlsConfig"]["serverName"] == "worker.tailrace.internal"
    assert set(OPTIONAL) <= set(objects) and not {"scaling.yaml", "route.yaml"} & set(render(tmp_path, PODS))


def test_kubernetes_expands_only_what_is_the_pods_own(tmp_path: Path) -> None:
    content = changed(PODS, "models.0.flags.chat-template", "{{ $(HOME) }} $5")
    command = pods(render(tmp_path, content))["worker"]["containers"][0]["command"]
    assert "{{ $$(HOME) }} $5" in command
    assert "$(POD_NAME)" in command and "$(POD_IP)" in command


@pytest.mark.parametrize(
    ("place", "value", "problem"),
    [
        ("models.0.replicas", None, r"models\[0\].replicas: how many instances\?"),
        (
            "models.0.http",
            "127.0.0.1:8000",
            r"models\[0\].http: 0.0.0.0:8000: 127.0.0.1:8000 is reached by nobody",
        ),
        ("tls", False, "tls: pods need tls: true"),
        ("kubernetes", {"scale_to": 2}, "kubernetes.scale_to: fewer than"),
        ("models.0.frontends", {}, r"models\[0\].frontends: a number"),
    ],
)
def test_what_kubernetes_cannot_run(tmp_path: Path, place: str, value: Any, problem: str) -> None:
    with pytest.raises(FleetError, match=problem):
        render(tmp_path, changed(PODS, place, value))


def test_hosts_are_chosen_by_kubernetes(tmp_path: Path) -> None:
    content = {**PODS, "hosts": {"a": {"address": "10.0.0.1"}}, "etcd": ["a"], "schedulers": 1}
    with pytest.raises(FleetError, match="hosts: Kubernetes chooses the machines"):
        render(tmp_path, content)
