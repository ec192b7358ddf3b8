"""Fleets on Kubernetes for tests: their objects, and what checks them."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml
from kubernetes_validate import latest_version, validate

from tailrace.cli.fleet_file import common_options
from tailrace.fleet.kubernetes import files, identities, objects
from tests.fleet.files import MODEL, PODS, changed, read

Objects = dict[str, list[dict[str, Any]]]
"""By file."""

EXAMPLES: Final = Path("deploy/kubernetes").resolve()
ALERTS: Final = "groups: [{name: one, rules: [{alert: A, expr: up == 0, labels: {a: '{{ $value }}'}}]}]"
# A small one without TLS and GPUs, and a large one with nearly everything.
SMALL: Final = {
    "models": [{**MODEL, "replicas": 1, "http": "0.0.0.0:8000", "engine": "simulated"}],
    "insecure": True,
    "kubernetes": {"etcd": 1},
}
LARGE: Final = {
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
        "drain": 60,
        "console": "admin",
    },
}
# Two models behind an edge, without TLS, and with Rust; the second has a policy of its own and spans pods.
EDGE: Final = {
    "http": "0.0.0.0:8000",
    "models": [
        {"model": "org/chat", "replicas": 1, "front": "rust", "flags": {"served-model-name": "chat"}},
        {
            "model": "org/coder",
            "replicas": 1,
            "flags": {"served-model-name": "coder", "tensor-parallel-size": 4},
            "slo": {"ttft": "1s"},
            "kubernetes": {"nodes": 2},
        },
    ],
    "insecure": True,
    "cluster": "prod",
}
FLEETS: Final[Mapping[str, Any]] = {
    "usual": PODS,
    "small": SMALL,
    "large": LARGE,
    "edge": EDGE,
    **{path.parent.name: yaml.safe_load(path.read_text()) for path in EXAMPLES.glob("*/fleet.yaml")},
}


def render(content: Any) -> Objects:
    """Return the objects of a fleet file, as they are read back."""
    with tempfile.TemporaryDirectory() as folder:
        file, options = read(Path(folder), content, common_options)
    paths = {path: b"secret" for name in ("ca.crt", "tls.crt", "tls.key") for path in (name, f"etcd/{name}")}
    made = file.fleet.kubernetes.certificates == "tailrace"
    certificates = dict.fromkeys(identities(file.fleet, options) if made else [], paths)
    texts = files(objects(file.fleet, options, certificates, '{"keys": []}', ALERTS))
    return {name: [*yaml.safe_load_all(text)] for name, text in texts.items()}


@functools.cache
def fleet(name: str) -> Objects:
    """Return the objects of one of FLEETS; not to be changed."""
    return render(FLEETS[name])


def find(made: Objects, kind: str, name: str) -> dict[str, Any]:
    """Return one object."""
    (found,) = [
        each
        for documents in made.values()
        for each in documents
        if each["kind"] == kind and each["metadata"]["name"] == name
    ]
    return found


def pods(made: Objects) -> dict[str, dict[str, Any]]:
    """Return the specification of each kind's pods, by the name of their container."""
    return {
        template["spec"]["containers"][0]["name"]: template["spec"]
        for each in made["fleet.yaml"]
        for template in _templates(each)
    }


def _templates(workload: Mapping[str, Any]) -> list[dict[str, Any]]:
    group = workload["spec"].get("leaderWorkerTemplate")
    if group is not None:
        return [group["leaderTemplate"], group["workerTemplate"]]
    return [workload["spec"]["template"]] if "template" in workload["spec"] else []


# Of those kinds of others whose schemas no package of Python's has, the fields that there are.
_FIELDS: Final[Mapping[str, Any]] = {
    "LeaderWorkerSet": {
        "replicas": int,
        "startupPolicy": str,
        "rolloutStrategy": {
            "type": str,
            "rollingUpdateConfiguration": {"maxUnavailable": int, "maxSurge": int},
        },
        "leaderWorkerTemplate": {
            "size": int,
            "restartPolicy": str,
            "leaderTemplate": dict,
            "workerTemplate": dict,
        },
    },
    "HTTPRoute": {"parentRefs": list, "hostnames": list, "rules": list},
}


def check(each: Mapping[str, Any]) -> None:
    """Check an object against Kubernetes' schemas; one of others as far as it has pods or is known here."""
    group = each["apiVersion"].partition("/")[0]
    if group == "kustomize.config.k8s.io":
        return
    if "." not in group or (group.endswith(".k8s.io") and group.count(".") == 2 and "gateway" not in group):
        validate(each, latest_version(), strict=True)
        return
    if each["kind"] in _FIELDS:
        _check_fields(each["spec"], _FIELDS[each["kind"]])
    for template in _templates(each) if each["kind"] == "LeaderWorkerSet" else []:
        holder = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "it"}, "template": template}
        validate(holder, latest_version(), strict=True)


def _check_fields(value: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    for name, each in value.items():
        if isinstance(known[name], dict):
            _check_fields(each, known[name])
        else:
            assert isinstance(each, known[name]), name
