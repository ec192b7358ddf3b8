"""The objects of a fleet on Kubernetes, from the same plan as its processes elsewhere. Pure."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import yaml

from tailrace import __version__
from tailrace.address import parse_address
from tailrace.fleet.file import Fleet, FleetError
from tailrace.fleet.folders import CONTAINER_USER, ETCD_IMAGE, KEYS, SCRAPER, kind_of, stop_s
from tailrace.fleet.hosts import METRICS_ABOVE, PORTS
from tailrace.local.certificates import span_certificates
from tailrace.local.options import ClusterOptions, Engine
from tailrace.local.plan import PartSpec, Tier, environment_of, frontend_part, worker_part
from tailrace.security.credentials import AUTHORITIES, CERTIFICATE, KEY
from tailrace.security.options import exposed
from tailrace.security.roles import Identity, Role, server_name
from tailrace.service.etcd import CLIENT_PORT, PEER_PORT, Member, member_command

Manifest = dict[str, Any]
Certificates = Mapping[Identity, Mapping[str, bytes]]
"""Files of each certificate's folder, by their paths in it."""

_DATA: Final = "/var/lib/tailrace"
_TLS: Final = "/etc/tailrace/tls"
_KEYS: Final = "/etc/tailrace/keys"
_MODELS: Final = "/models"
# Kubernetes puts them into commands.
_ID: Final = "$(POD_NAME)"
_ADDRESS: Final = "$(POD_IP)"
_OWN: Final = re.compile(r"(\$\(POD_NAME\)|\$\(POD_IP\))")
_POD: Final = [
    {"name": name, "valueFrom": {"fieldRef": {"fieldPath": field}}}
    for name, field in (("POD_NAME", "metadata.name"), ("POD_IP", "status.podIP"))
]
_USER: Final = int(CONTAINER_USER)
_PART_OF: Final = {"app.kubernetes.io/part-of": "tailrace"}
_API: Final = "app.kubernetes.io/component"
# An engine loads its model.
_START_TRIES: Final = 180
_PROBE: Final = {"periodSeconds": 10, "timeoutSeconds": 8}
# Requests and limits of everything but workers.
_SMALL: Final = {"requests": {"cpu": "500m", "memory": "512Mi"}, "limits": {"memory": "4Gi"}}
_FRONTEND: Final = {"requests": {"cpu": "2", "memory": "4Gi"}, "limits": {"memory": "16Gi"}}


def identities(fleet: Fleet) -> dict[Identity, list[str]]:
    """Return whose certificates the pods need, with the host names in them. Pods of a kind share one."""
    if not fleet.tls:
        return {}
    names = {Identity(Role(kind), kind): [kind] for kind in PORTS}
    names[SCRAPER] = []
    if isinstance(fleet.kubernetes.etcd, int):
        members = [member.client.rpartition(":")[0] for member in _members(fleet)]
        # Those of a port forwarded to a member, for tailrace etcd-roles.
        names[Identity(Role.ETCD, "etcd")] = [*members, "etcd", "localhost", "127.0.0.1"]
    return names


OPTIONAL: Final = {
    "monitoring.yaml": "with the Prometheus operator",
    "scaling.yaml": "with KEDA",
    "route.yaml": "with a Gateway",
}
"""Files with objects of others, and what they need."""


def files(
    fleet: Fleet, options: ClusterOptions, certificates: Certificates, keys: str, alerts: str
) -> dict[str, str]:
    """Return the files of the objects, for `kubectl apply --kustomize`, and optional ones beside them.

    `options`: those that hold wherever the processes run; `keys`, `alerts`: texts of the users' keys and of
    Prometheus's rules. Raise FleetError for what is not possible on Kubernetes.
    """
    require_possible(fleet)
    parts = _parts(fleet, options)
    objects = {
        "namespace.yaml": [_object("v1", "Namespace", fleet.kubernetes.namespace, fleet, namespaced=False)],
        "secrets.yaml": [*_secrets(fleet, certificates, keys)],
        "fleet.yaml": [each for part in parts for each in _workload(fleet, options, part)],
        "network.yaml": [*_network(fleet)],
        "monitoring.yaml": [*_monitoring(fleet, parts, alerts)],
        "scaling.yaml": [_scaled(fleet, options)] if fleet.kubernetes.scale_to else [],
        "route.yaml": [_route(fleet)] if fleet.kubernetes.gateway else [],
    }
    texts = {
        name: "---\n".join(yaml.safe_dump(each, sort_keys=False, width=110) for each in documents)
        for name, documents in objects.items()
        if documents
    }
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [name for name in texts if name not in OPTIONAL],
    }
    return {"kustomization.yaml": yaml.safe_dump(kustomization, sort_keys=False), **texts}


def require_possible(fleet: Fleet) -> None:
    """Raise FleetError, which names the field."""
    model = fleet.model
    if fleet.hosts:
        raise FleetError("hosts: Kubernetes chooses the machines: leave hosts out")
    if model.number is None:
        raise FleetError("models[0].replicas: how many instances?")
    if not isinstance(model.frontends, int):
        raise FleetError("models[0].frontends: a number: Kubernetes chooses the machines")
    if not exposed([model.http]):
        port = parse_address(model.http)[1]
        raise FleetError(f"models[0].http: 0.0.0.0:{port}: {model.http} is reached by nobody else in a pod")
    if not (fleet.tls or fleet.insecure):
        raise FleetError("tls: pods need tls: true (or insecure: true in a network of yours alone)")
    if 0 < fleet.kubernetes.scale_to < model.number:
        raise FleetError("kubernetes.scale_to: fewer than models[0].replicas")


@dataclass(frozen=True, slots=True)
class _Part:
    """The pods of one kind."""

    spec: PartSpec
    count: int

    @property
    def kind(self) -> str:
        return kind_of(self.spec)


def _parts(fleet: Fleet, options: ClusterOptions) -> list[_Part]:
    service = _service_of(fleet)
    keys = ["--api-keys", f"{_KEYS}/{KEYS}"] if fleet.keys else []
    with_keys = replace(options, frontend_arguments=(*options.frontend_arguments, *keys))
    model = fleet.model
    assert model.number is not None and isinstance(model.frontends, int)
    parts = [
        _Part(service("monitor", "monitor", Tier.CONTROL), 1),
        _Part(service("migration", "migration", Tier.CONTROL, "--journal", f"{_DATA}/migrations.jsonl"), 1),
        _Part(service("scheduler", "scheduler", Tier.CONTROL), fleet.schedulers),
        _Part(worker_part(options, service, "worker", range(1)), model.number),
        _Part(frontend_part(with_keys, service, "frontend", model.http), model.frontends),
    ]
    if isinstance(fleet.kubernetes.etcd, int):
        tls = Path(_TLS) if fleet.tls else None
        own = _member(fleet, _ID)
        command = member_command("etcd", Path("/var/lib/etcd/data"), own, _members(fleet), tls)
        role = Role.ETCD.value if fleet.tls else ""
        parts.insert(0, _Part(PartSpec("etcd", Tier.ETCD, command, "", role=role), fleet.kubernetes.etcd))
    return parts


def _member(fleet: Fleet, name: str) -> Member:
    # The name that its certificate has, too.
    host = f"{name}.etcd.{fleet.kubernetes.namespace}.svc"
    return Member(name, f"{host}:{CLIENT_PORT}", f"{host}:{PEER_PORT}")


def _members(fleet: Fleet) -> list[Member]:
    count = fleet.kubernetes.etcd
    return [_member(fleet, f"etcd-{number}") for number in range(count)] if isinstance(count, int) else []


def endpoints(fleet: Fleet) -> list[str]:
    """Return etcd's addresses for the pods."""
    given = fleet.kubernetes.etcd
    return given if isinstance(given, list) else [member.client for member in _members(fleet)]


def _service_of(fleet: Fleet) -> Callable[..., PartSpec]:
    """Return what plans a service. Each pod has an address of its own, so that ports are fixed."""

    def service(kind: str, name: str, tier: Tier, *arguments: str) -> PartSpec:
        port = PORTS[kind]
        command = ["tailrace", "serve", kind, "--etcd", ",".join(endpoints(fleet))]
        command += ["--cluster", fleet.cluster, "--listen", f"0.0.0.0:{port}"]
        command += ["--metrics", f"0.0.0.0:{port + METRICS_ABOVE}", "--id", _ID, "--advertise", _ADDRESS]
        command += ["--tls", _TLS] if fleet.tls else ["--insecure"]
        environment = span_certificates(_TLS) if fleet.tls else {}
        role = kind if fleet.tls else ""
        return PartSpec(
            name, tier, [*command, *arguments], f"{_ADDRESS}:{port}", environment=environment, role=role
        )

    return service


def _object(api: str, kind: str, name: str, fleet: Fleet, namespaced: bool = True, **rest: Any) -> Manifest:
    metadata: Manifest = {"name": name}
    if namespaced:
        metadata["namespace"] = fleet.kubernetes.namespace
    metadata["labels"] = {**_PART_OF, "app.kubernetes.io/version": __version__}
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **rest}


def _labels(kind: str) -> dict[str, str]:
    return {**_PART_OF, _API: kind}


def _workload(fleet: Fleet, options: ClusterOptions, part: _Part) -> Iterator[Manifest]:
    """Yield the pods of a kind, how they are reached, and how many may be away at once."""
    kind = part.kind
    selector = {"matchLabels": _labels(kind)}
    template = {"metadata": {"labels": _labels(kind)}, "spec": _pod(fleet, options, part)}
    spec: Manifest = {"replicas": part.count, "selector": selector, "template": template}
    if kind in ("etcd", "worker"):
        # A worker keeps its id, and the last one is the first to go.
        spec |= {"serviceName": kind, "podManagementPolicy": "Parallel"}
        if kind == "etcd":
            size = {"requests": {"storage": fleet.kubernetes.storage}}
            claim = {"accessModes": ["ReadWriteOnce"], "resources": size}
            spec["volumeClaimTemplates"] = [{"metadata": {"name": "etcd"}, "spec": claim}]
        yield _object("apps/v1", "StatefulSet", kind, fleet, spec=spec)
    else:
        # One more before one less.
        spec["strategy"] = {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
        yield _object("apps/v1", "Deployment", kind, fleet, spec=spec)
    if kind != "migration":
        yield _reached(fleet, kind)
    if part.count > 1:
        budget = {"maxUnavailable": 1, "selector": selector}
        yield _object("policy/v1", "PodDisruptionBudget", kind, fleet, spec=budget)


def _reached(fleet: Fleet, kind: str) -> Manifest:
    """Return the service in front of pods. Pods find each other in etcd: these are for names, and for
    people."""
    ports = _ports(fleet, kind)
    names = {"etcd": ["client", "peer"], "frontend": ["http"]}.get(kind, ["grpc"])
    spec: Manifest = {
        "selector": _labels(kind),
        "ports": [{"name": name, "port": ports[name]} for name in names],
    }
    if kind in ("etcd", "worker"):
        # Members look for each other before they are ready.
        spec |= {"clusterIP": "None", "publishNotReadyAddresses": True}
    if kind == "frontend":
        spec["type"] = fleet.kubernetes.service
    return _object("v1", "Service", kind, fleet, spec=spec)


def _pod(fleet: Fleet, options: ClusterOptions, part: _Part) -> Manifest:
    kind = part.kind
    volumes: list[Manifest] = [{"name": "tmp", "emptyDir": {}}]
    mounts: list[Manifest] = [{"name": "tmp", "mountPath": "/tmp"}]

    def mount(name: str, path: str, volume: Manifest | None, read_only: bool = False) -> None:
        volumes.extend([] if volume is None else [{"name": name, **volume}])
        mounts.append({"name": name, "mountPath": path, **({"readOnly": True} if read_only else {})})

    if kind == "etcd":
        # Its claim is a template of the set.
        mount("etcd", "/var/lib/etcd", None)
    else:
        mount("data", _DATA, {"emptyDir": {}})
    if part.spec.role:
        mount("tls", _TLS, {"secret": _secret_volume(part.spec.role)}, read_only=True)
    if kind == "frontend" and fleet.keys:
        keys = {"secretName": "keys", "defaultMode": 0o440}
        mount("keys", _KEYS, {"secret": keys}, read_only=True)
    if kind == "worker":
        mount("shm", "/dev/shm", {"emptyDir": {"medium": "Memory"}})
    if kind in ("worker", "frontend") and (claim := fleet.kubernetes.models):
        mount("models", _MODELS, {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}}, True)
    affinity = {
        "podAffinityTerm": {"labelSelector": {"matchLabels": _labels(kind)}, "topologyKey": _HOSTNAME},
        "weight": 100,
    }
    spec: Manifest = {
        "terminationGracePeriodSeconds": stop_s(kind) + _MARGIN_S,
        "automountServiceAccountToken": False,
        # A variable for every service of the namespace, such as SCHEDULER_PORT, is of no use to anyone.
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(fleet, options, part, mounts)],
        "volumes": volumes,
    }
    if part.count > 1 and kind != "worker":
        spec["affinity"] = {
            "podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [affinity]}
        }
    return spec


_HOSTNAME: Final = "kubernetes.io/hostname"
# Between a container's own deadline and its end by force.
_MARGIN_S: Final = 30


def _secret_volume(role: str) -> Manifest:
    """Return the certificate's folder: keys of a Secret cannot have slashes."""
    files = [AUTHORITIES, CERTIFICATE, KEY]
    paths = [*files] if role == Role.ETCD else [*files, *(f"etcd/{name}" for name in files)]
    items = [{"key": _key(path), "path": path} for path in paths]
    return {"secretName": f"tls-{role}", "defaultMode": 0o440, "items": items}


def _key(path: str) -> str:
    return path.replace("/", "-")


def _container(fleet: Fleet, options: ClusterOptions, part: _Part, mounts: Sequence[Manifest]) -> Manifest:
    kind, own = part.kind, fleet.kubernetes
    image = "engine" if kind in ("worker", "frontend") else "control"
    prefix = f"{own.registry}/" if own.registry else ""
    environment = {**part.spec.environment}
    if kind != "etcd":
        environment = {**environment_of(options, f"monitor:{PORTS['monitor']}"), **environment}
    security: Manifest = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    if kind == "worker" and own.rdma:
        # Memory of RDMA is pinned.
        security["capabilities"]["add"] = ["IPC_LOCK"]
    return {
        "name": kind,
        "image": ETCD_IMAGE if kind == "etcd" else f"{prefix}tailrace-{image}:{__version__}",
        "command": [_escaped(word) for word in part.spec.command],
        "env": [*_POD, *({"name": name, "value": _escaped(value)} for name, value in environment.items())],
        "ports": [{"name": name, "containerPort": port} for name, port in _ports(fleet, kind).items()],
        **_probes(part),
        "resources": _resources(fleet, options, kind),
        "securityContext": security,
        "volumeMounts": [*mounts],
    }


def _escaped(word: str) -> str:
    """Return a word in which Kubernetes expands nothing but the pod's own name and address."""
    return "".join(
        part if part in (_ID, _ADDRESS) else part.replace("$(", "$$(") for part in _OWN.split(word)
    )


def _ports(fleet: Fleet, kind: str) -> dict[str, int]:
    """Return the ports of a kind of pod, by their names."""
    if kind == "etcd":
        return {"client": CLIENT_PORT, "peer": PEER_PORT}
    ports = {"grpc": PORTS[kind], "metrics": PORTS[kind] + METRICS_ABOVE}
    return ports | ({"http": parse_address(fleet.model.http)[1]} if kind == "frontend" else {})


def _probes(part: _Part) -> Manifest:
    """Return when a pod takes requests. Nothing ends one that is slow: a process that makes no progress ends
    by itself."""
    if part.kind == "etcd":
        return {"readinessProbe": {"tcpSocket": {"port": CLIENT_PORT}, **_PROBE}}
    port = PORTS[part.kind]
    probe: Manifest = {"grpc": {"port": port}}
    if part.spec.role:
        # Kubernetes has no certificate.
        command = ["python", "-m", "tailrace.service.probe", f"127.0.0.1:{port}", "--tls", _TLS]
        probe = {"exec": {"command": command}}
    start = {"startupProbe": {**probe, **_PROBE, "failureThreshold": _START_TRIES}}
    return {**(start if part.kind in ("worker", "frontend") else {}), "readinessProbe": {**probe, **_PROBE}}


def _resources(fleet: Fleet, options: ClusterOptions, kind: str) -> Manifest:
    if kind != "worker":
        return _FRONTEND if kind == "frontend" else _SMALL
    own = fleet.kubernetes
    gpus = own.gpus
    if gpus is None:
        gpus = options.ranks if options.engine is Engine.VLLM else 0
    devices = {own.gpu: gpus} if gpus else {}
    devices |= {own.rdma: 1} if own.rdma else {}
    return {
        "requests": {"cpu": own.cpu, "memory": own.memory, **devices},
        "limits": {"memory": own.memory, **devices},
    }


def _secrets(fleet: Fleet, certificates: Certificates, keys: str) -> Iterator[Manifest]:
    for identity, files in certificates.items():
        data = {_key(path): base64.b64encode(text).decode() for path, text in files.items()}
        yield _object("v1", "Secret", f"tls-{identity.role.value}", fleet, data=data)
    if fleet.keys:
        yield _object("v1", "Secret", "keys", fleet, stringData={KEYS: keys})


def _network(fleet: Fleet) -> Iterator[Manifest]:
    """Yield who reaches which pods: each other, and users the front ends; Prometheus, all metrics."""
    ours = {"podSelector": {"matchLabels": _PART_OF}}
    metrics = [port + METRICS_ABOVE for port in PORTS.values()]
    scraped = {"ports": [{"port": port, "protocol": "TCP"} for port in metrics]}
    inside = {"podSelector": {"matchLabels": _PART_OF}, "policyTypes": ["Ingress"]}
    rules: list[Manifest] = [{"from": [ours]}]
    # With TLS, Prometheus shows a certificate; without, add a rule for its namespace.
    rules += [scraped] if fleet.tls else []
    yield _object("networking.k8s.io/v1", "NetworkPolicy", "fleet", fleet, spec={**inside, "ingress": rules})
    port = parse_address(fleet.model.http)[1]
    users = {
        "podSelector": {"matchLabels": _labels("frontend")},
        "policyTypes": ["Ingress"],
        "ingress": [{"ports": [{"port": port, "protocol": "TCP"}]}],
    }
    yield _object("networking.k8s.io/v1", "NetworkPolicy", "users", fleet, spec=users)


def _monitoring(fleet: Fleet, parts: Sequence[_Part], alerts: str) -> Iterator[Manifest]:
    """Yield what the Prometheus operator reads."""
    for part in parts:
        if part.kind == "etcd":
            continue
        endpoint: Manifest = {"port": "metrics", "interval": "5s", "scrapeTimeout": "4s"}
        if part.kind == "monitor":
            # It speaks of instances by their ids: its label `instance` is kept, not taken for the target's.
            endpoint["honorLabels"] = True
        if fleet.tls:
            name = f"tls-{SCRAPER.role.value}"
            endpoint["scheme"] = "https"
            endpoint["tlsConfig"] = {
                "ca": {"secret": {"name": name, "key": AUTHORITIES}},
                "cert": {"secret": {"name": name, "key": CERTIFICATE}},
                "keySecret": {"name": name, "key": KEY},
                "serverName": server_name(Role(part.kind)),
            }
        # The label by which alerts and dashboards name a process.
        member = {"sourceLabels": ["__meta_kubernetes_pod_name"], "targetLabel": "member"}
        endpoint["relabelings"] = [member, {"targetLabel": "job", "replacement": f"tailrace-{part.kind}"}]
        spec = {"selector": {"matchLabels": _labels(part.kind)}, "podMetricsEndpoints": [endpoint]}
        yield _object("monitoring.coreos.com/v1", "PodMonitor", part.kind, fleet, spec=spec)
    rules = yaml.safe_load(alerts)
    yield _object("monitoring.coreos.com/v1", "PrometheusRule", "alerts", fleet, spec=rules)


def _scaled(fleet: Fleet, options: ClusterOptions) -> Manifest:
    """Return KEDA's object for as many instances as the scheduler asks for (docs/scaling.md)."""
    still = {"stabilizationWindowSeconds": 0}
    trigger = {
        "type": "prometheus",
        "metricType": "AverageValue",
        "metadata": {
            "serverAddress": fleet.kubernetes.prometheus,
            "query": f'max(tailrace_desired_instances{{model="{options.served_name}"}})',
            "threshold": "1",
            "ignoreNullValues": "false",
        },
    }
    spec = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "worker"},
        "minReplicaCount": fleet.model.number,
        "maxReplicaCount": fleet.kubernetes.scale_to,
        "pollingInterval": 15,
        "advanced": {
            # The cool-down is in the metric.
            "horizontalPodAutoscalerConfig": {"behavior": {"scaleUp": still, "scaleDown": still}}
        },
        "triggers": [trigger],
    }
    return _object("keda.sh/v1alpha1", "ScaledObject", "worker", fleet, spec=spec)


def _route(fleet: Fleet) -> Manifest:
    backend = {"name": "frontend", "port": parse_address(fleet.model.http)[1]}
    # A stream may last as long as it likes.
    rule = {"backendRefs": [backend], "timeouts": {"request": "0s"}}
    spec = {"parentRefs": [{"name": fleet.kubernetes.gateway}], "rules": [rule]}
    return _object("gateway.networking.k8s.io/v1", "HTTPRoute", "frontend", fleet, spec=spec)
