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
from tailrace.address import is_ip, parse_address
from tailrace.fleet.file import Fleet, FleetError
from tailrace.fleet.folders import CONTAINER_USER, ETCD_IMAGE, KEYS, SCRAPER, kind_of, stop_s
from tailrace.fleet.hosts import KV_PORT, METRICS_ABOVE, PORTS, STREAM_PORT
from tailrace.local.certificates import span_certificates
from tailrace.local.options import ClusterOptions, Engine, Front
from tailrace.local.plan import (
    PartSpec,
    Tier,
    environment_of,
    frontend_part,
    scheduler_arguments,
    worker_part,
)
from tailrace.security.access import METHODS
from tailrace.security.credentials import AUTHORITIES, CERTIFICATE, FOR_ETCD, KEY
from tailrace.security.options import exposed
from tailrace.security.roles import MEMBERS, Identity, Role, etcd_user, server_name
from tailrace.service.etcd import CLIENT_PORT, PEER_PORT, Member, member_command

Manifest = dict[str, Any]
Certificates = Mapping[Identity, Mapping[str, bytes]]
"""Files of each certificate's folder, by their paths in it."""

_DATA: Final = "/var/lib/tailrace"
_TLS: Final = "/etc/tailrace/tls"
_KEYS: Final = "/etc/tailrace/keys"
_MODELS: Final = "/models"
_OPERATOR_TLS: Final = "/etc/tailrace/operator"
# Kubernetes puts them into commands; the last two are of a pod of a LeaderWorkerSet.
_ID: Final = "$(POD_NAME)"
_ADDRESS: Final = "$(POD_IP)"
_LEADER: Final = "$(LWS_LEADER_ADDRESS)"
_NODE: Final = "$(NODE)"
_OWN: Final = re.compile(r"(\$\((?:POD_NAME|POD_IP|LWS_LEADER_ADDRESS|NODE)\))")
_USER: Final = int(CONTAINER_USER)
_PART_OF: Final = {"app.kubernetes.io/part-of": "tailrace"}
_COMPONENT: Final = "app.kubernetes.io/component"
_NODE_LABEL: Final = "leaderworkerset.sigs.k8s.io/worker-index"
_RANKS_PORT: Final = 29_600
# One for each rank and network device.
_KV_PORTS: Final = range(KV_PORT, KV_PORT + 64)
_CONSOLE_PORT: Final = 8081
# Seconds between two looks at the metric; at zero, requests wait for it.
_POLLING_S: Final = 15
_POLLING_AT_ZERO_S: Final = 5
# An hour: an engine loads its model, and a front end waits for the first one.
_START_TRIES: Final = 360
_PROBE: Final = {"periodSeconds": 10, "timeoutSeconds": 8}
# As long as a process that makes no progress lives (TAILRACE_WATCHDOG_S).
_ALIVE: Final = {**_PROBE, "failureThreshold": 30}
# Until nothing sends new connections to a pod that ends.
_LEAVE_S: Final = 5
# Between a container's own deadline and its end by force.
_MARGIN_S: Final = 30
# Requests and limits of everything but workers.
_SMALL: Final = {"requests": {"cpu": "500m", "memory": "512Mi"}, "limits": {"memory": "4Gi"}}
_FRONTEND: Final = {"requests": {"cpu": "2", "memory": "4Gi"}, "limits": {"memory": "16Gi"}}
_ENGINES: Final = ("worker", "ranks")
_WITH_VLLM: Final = (*_ENGINES, "frontend", "console")
_SPREAD: Final = ("kubernetes.io/hostname", "topology.kubernetes.io/zone")

SECRETS: Final = "secrets.yaml"
"""File with keys."""
OPTIONAL: Final = {
    "monitoring.yaml": "with the Prometheus operator",
    "scaling.yaml": "with KEDA",
    "route.yaml": "with a Gateway",
}
"""Files with objects of others, and what they need."""
NOT_ALWAYS: Final = (*OPTIONAL, "certificates.yaml")
"""Files that a fleet may do without."""
OPERATORS: Final = (Identity(Role.ADMIN, "operator"), Identity(Role.ETCD_ROOT, "etcd-root"))
"""Whose certificates cert-manager makes besides."""
_DRAINER: Final = Identity(Role.ADMIN, "drain")


def identities(fleet: Fleet) -> dict[Identity, list[str]]:
    """Return whose certificates the pods need, with the host names in them. Pods of a kind share one."""
    if not fleet.tls:
        return {}
    own = fleet.kubernetes
    names = {Identity(Role(kind), kind): [kind] for kind in PORTS}
    names[SCRAPER] = []
    if own.console:
        names[Identity(Role(own.console), "console")] = []
    if own.drain:
        names[_DRAINER] = []
    if isinstance(own.etcd, int):
        members = [member.client.rpartition(":")[0] for member in _members(fleet)]
        # Those of a port forwarded to a member, for tailrace etcd-roles.
        names[Identity(Role.ETCD, "etcd")] = [*members, "etcd", "localhost", "127.0.0.1"]
    return names


def files(objects: Mapping[str, Sequence[Manifest]]) -> dict[str, str]:
    """Return the files for `kubectl apply --kustomize`, and optional ones beside them, of objects by file."""
    texts = {name: to_yaml(documents) for name, documents in objects.items()}
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [name for name in texts if name not in OPTIONAL],
    }
    return {"kustomization.yaml": yaml.safe_dump(kustomization, sort_keys=False), **texts}


def to_yaml(documents: Sequence[Manifest]) -> str:
    """Return objects as YAML."""
    return yaml.dump_all(documents, Dumper=_InFull, sort_keys=False, width=110)


class _InFull(yaml.SafeDumper):
    """Write what is the same in two places twice: people and Helm read it."""

    def ignore_aliases(self, data: Any) -> bool:
        """Return True."""
        return True


def objects(
    fleet: Fleet, options: ClusterOptions, certificates: Certificates, keys: str, alerts: str
) -> dict[str, list[Manifest]]:
    """Return the objects by file.

    `options`: those that hold wherever the processes run; `certificates`: those of identities(), unless
    cert-manager makes them; `keys`, `alerts`: texts of the users' keys and of Prometheus's rules. Raise
    FleetError for what is not possible on Kubernetes.
    """
    require_possible(fleet, options)
    parts = _parts(fleet, options)
    documents = {
        "namespace.yaml": [_object("v1", "Namespace", fleet.kubernetes.namespace, fleet, namespaced=False)],
        SECRETS: [*_secrets(fleet, certificates, keys)],
        "certificates.yaml": [*_certificates(fleet)],
        "fleet.yaml": [each for part in parts for each in _workload(fleet, options, part)],
        "network.yaml": [*_network(fleet, parts)],
        "monitoring.yaml": [*_monitoring(fleet, parts, alerts)],
        "scaling.yaml": [_scaled(fleet, options)] if _most(fleet) else [],
        "route.yaml": [_route(fleet)] if fleet.kubernetes.gateway else [],
    }
    return {name: each for name, each in documents.items() if each}


def require_possible(fleet: Fleet, options: ClusterOptions) -> None:
    """Raise FleetError, which names the field."""
    model, own = fleet.model, fleet.kubernetes
    if fleet.http:
        raise FleetError(
            "http: one address for several models is for machines of yours so far: a file and a namespace "
            "for each model here, and a gateway before them"
        )
    if fleet.hosts:
        raise FleetError("hosts: Kubernetes chooses the machines: leave hosts out")
    if model.number is None:
        raise FleetError("models[0].replicas: how many instances?")
    if model.front is Front.BOTH:
        raise FleetError("models[0].front: both: on one machine only; python, or rust")
    if not isinstance(model.frontends, int):
        raise FleetError("models[0].frontends: a number: Kubernetes chooses the machines")
    if not exposed([model.http]):
        port = parse_address(model.http)[1]
        raise FleetError(f"models[0].http: 0.0.0.0:{port}: {model.http} is reached by nobody else in a pod")
    if not (fleet.tls or fleet.insecure):
        raise FleetError("tls: pods need tls: true (or insecure: true in a network of yours alone)")
    if own.scale_to and model.autoscale is not None:
        raise FleetError("kubernetes.scale_to: models[0].autoscale.max says it")
    if 0 < own.scale_to < model.number:
        raise FleetError("kubernetes.scale_to: fewer than models[0].replicas")
    if own.certificates == "cert-manager" and not fleet.tls:
        raise FleetError("kubernetes.certificates: cert-manager needs tls: true")
    if own.nodes > 1:
        if model.engine is Engine.SIMULATED:
            raise FleetError("kubernetes.nodes: a simulated engine is one process")
        if options.ranks % own.nodes or options.ranks == 1:
            raise FleetError(
                f"kubernetes.nodes: {options.ranks} ranks (tensor x pipeline parallel) cannot be divided "
                f"among {own.nodes} pods"
            )
        if not fleet.insecure:
            raise FleetError(
                "insecure: true is needed with kubernetes.nodes, even with tls: ranks on several pods speak "
                "to each other unencrypted (docs/security.md)"
            )


@dataclass(frozen=True, slots=True)
class _Part:
    """The pods of one kind."""

    spec: PartSpec
    count: int
    # Of each, on further pods.
    ranks: _Part | None = None

    @property
    def kind(self) -> str:
        return kind_of(self.spec)


def _parts(fleet: Fleet, options: ClusterOptions) -> list[_Part]:
    service, own, model = _service_of(fleet), fleet.kubernetes, fleet.model
    keys = ["--api-keys", f"{_KEYS}/{KEYS}"] if fleet.keys else []
    with_keys = replace(options, frontend_arguments=(*options.frontend_arguments, *keys))
    assert model.number is not None and isinstance(model.frontends, int)
    bounds = [] if options.bounds is None else [options.bounds]
    parts = [
        _Part(service("monitor", "monitor", Tier.CONTROL), 1),
        _Part(service("migration", "migration", Tier.CONTROL, "--journal", f"{_DATA}/migrations.jsonl"), 1),
        _Part(
            service("scheduler", "scheduler", Tier.CONTROL, *scheduler_arguments(bounds)), fleet.schedulers
        ),
        _worker(fleet, options, service),
        _Part(frontend_part(with_keys, service, "frontend", model.http), model.frontends),
    ]
    if isinstance(own.etcd, int):
        tls = Path(_TLS) if fleet.tls else None
        command = member_command(
            "etcd", Path("/var/lib/etcd/data"), _member(fleet, _ID), _members(fleet), tls
        )
        parts.insert(0, _Part(PartSpec("etcd", Tier.ETCD, command, "", role=_role(fleet, "etcd")), own.etcd))
    if own.console:
        command = ["tailrace", "serve", "console", "--http", f"0.0.0.0:{_CONSOLE_PORT}"]
        command += ["--admin", f"scheduler:{PORTS['scheduler']}", "--token-file", f"{_DATA}/console.token"]
        command += ["--tls", _TLS] if fleet.tls else []
        parts.append(_Part(PartSpec("console", Tier.CONSOLE, command, "", role=_role(fleet, "console")), 1))
    return parts


def _role(fleet: Fleet, kind: str) -> str:
    return kind if fleet.tls else ""


def _worker(fleet: Fleet, options: ClusterOptions, service: Callable[..., PartSpec]) -> _Part:
    """Return the pods of the instances."""
    arguments = ["--stream-port", str(STREAM_PORT), "--kv-ports", f"{_KV_PORTS[0]}-{_KV_PORTS[-1]}"]
    nodes, number = fleet.kubernetes.nodes, fleet.model.number
    assert number is not None
    ranks = None
    if nodes > 1:
        arguments += ["--nnodes", str(nodes), "--master-addr", _ADDRESS, "--master-port", str(_RANKS_PORT)]
        command = ["tailrace", "serve", "ranks", "--worker", f"{_LEADER}:{_RANKS_PORT}"]
        ranks = _Part(
            PartSpec("ranks", Tier.WORKER, [*command, "--node", _NODE, "--insecure"], ""), nodes - 1
        )

    def planned(kind: str, name: str, tier: Tier, *rest: str) -> PartSpec:
        return service(kind, name, tier, *arguments, *rest)

    return _Part(worker_part(options, planned, "worker", range(1)), number, ranks)


def _member(fleet: Fleet, name: str) -> Member:
    # The name that its certificate has, too; found in any namespace.
    host = f"{name}.etcd"
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
        command += ["--tls", _TLS] if fleet.tls else []
        command += ["--insecure"] if fleet.insecure else []
        environment = span_certificates(_TLS) if fleet.tls else {}
        return PartSpec(
            name,
            tier,
            [*command, *arguments],
            f"{_ADDRESS}:{port}",
            environment=environment,
            role=_role(fleet, kind),
        )

    return service


def _object(api: str, kind: str, name: str, fleet: Fleet, namespaced: bool = True, **rest: Any) -> Manifest:
    metadata: Manifest = {"name": name}
    if namespaced:
        metadata["namespace"] = fleet.kubernetes.namespace
    metadata["labels"] = {**_PART_OF, "app.kubernetes.io/version": __version__}
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **rest}


def _labels(kind: str) -> dict[str, str]:
    return {**_PART_OF, _COMPONENT: kind}


def _workload(fleet: Fleet, options: ClusterOptions, part: _Part) -> Iterator[Manifest]:
    """Yield the pods of a kind, how they are reached, and how many may be away at once."""
    kind, own = part.kind, fleet.kubernetes
    selector = {"matchLabels": _labels(kind)}
    template = {"metadata": {"labels": _labels(kind)}, "spec": _pod(fleet, options, part)}
    # Who scales sets it.
    count = {} if kind == "worker" and _most(fleet) else {"replicas": part.count}
    if part.ranks is not None:
        yield _leader_set(fleet, options, part.ranks, template, count)
    elif kind in ("etcd", "worker"):
        # A worker keeps its id, and the last one is the first to go.
        spec: Manifest = {**count, "selector": selector, "serviceName": kind}
        spec["podManagementPolicy"] = "Parallel"
        if kind == "etcd":
            size = {"requests": {"storage": own.storage}}
            claim: Manifest = {"accessModes": ["ReadWriteOnce"], "resources": size}
            claim |= {"storageClassName": own.storage_class} if own.storage_class else {}
            spec["volumeClaimTemplates"] = [{"metadata": {"name": "etcd"}, "spec": claim}]
        yield _object("apps/v1", "StatefulSet", kind, fleet, spec={**spec, "template": template})
    else:
        # One more before one less.
        strategy = {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
        spec = {**count, "selector": selector, "strategy": strategy, "template": template}
        yield _object("apps/v1", "Deployment", kind, fleet, spec=spec)
    # A LeaderWorkerSet has a Service of its own.
    if kind not in ("migration", "console") and part.ranks is None:
        yield _reached(fleet, kind)
    if part.count > 1 or (kind == "worker" and _most(fleet) > 1):
        budget = {"maxUnavailable": 1, "selector": selector}
        yield _object("policy/v1", "PodDisruptionBudget", kind, fleet, spec=budget)


def _leader_set(
    fleet: Fleet, options: ClusterOptions, ranks: _Part, leader: Manifest, count: Manifest
) -> Manifest:
    """Return instances that span pods: the first has the engine core, the others its further ranks."""
    template = {"metadata": {"labels": _labels(ranks.kind)}, "spec": _pod(fleet, options, ranks)}
    group = {
        "size": ranks.count + 1,
        # Whichever pod is lost, the engine is.
        "restartPolicy": "RecreateGroupOnPodRestart",
        "leaderTemplate": leader,
        "workerTemplate": template,
    }
    rollout = {
        "type": "RollingUpdate",
        "rollingUpdateConfiguration": {"maxUnavailable": 1, "maxSurge": 0},
    }
    spec = {
        **count,
        "startupPolicy": "LeaderCreated",
        "rolloutStrategy": rollout,
        "leaderWorkerTemplate": group,
    }
    return _object("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", "worker", fleet, spec=spec)


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
        mount("tls", _TLS, _certificate_volume(kind), read_only=True)
    if kind == "worker" and _drains(fleet) and fleet.tls:
        mount("operator", _OPERATOR_TLS, _certificate_volume(_DRAINER.name), read_only=True)
    if kind == "frontend" and fleet.keys:
        keys = {"secretName": "keys", "defaultMode": 0o440}
        mount("keys", _KEYS, {"secret": keys}, read_only=True)
    if kind in _ENGINES:
        mount("shm", "/dev/shm", {"emptyDir": {"medium": "Memory"}})
    if kind in (*_ENGINES, "frontend") and (claim := fleet.kubernetes.models):
        mount("models", _MODELS, {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}}, True)
    drain_s = fleet.kubernetes.drain if kind == "worker" else _LEAVE_S if kind == "frontend" else 0
    spec: Manifest = {
        "terminationGracePeriodSeconds": drain_s + stop_s(part.spec) + _MARGIN_S,
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
    if kind in PORTS or kind == "etcd":
        # KV moves between workers: not away from each other's zone.
        spec["topologySpreadConstraints"] = [
            {
                "maxSkew": 1,
                "topologyKey": key,
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": _labels(kind)},
            }
            for key in (_SPREAD[:1] if kind == "worker" else _SPREAD)
        ]
    return spec


def _drains(fleet: Fleet) -> bool:
    return fleet.kubernetes.drain > 0


def _certificate_volume(name: str) -> Manifest:
    """Return the folder of a certificate, and the one for etcd in it, from their secrets."""
    files = [AUTHORITIES, CERTIFICATE, KEY]
    sources = [{"secret": {"name": f"tls-{name}", "items": [{"key": each, "path": each} for each in files]}}]
    if name in MEMBERS:
        items = [{"key": each, "path": f"{FOR_ETCD}/{each}"} for each in files]
        sources.append({"secret": {"name": f"etcd-{name}", "items": items}})
    return {"projected": {"defaultMode": 0o440, "sources": sources}}


def _container(fleet: Fleet, options: ClusterOptions, part: _Part, mounts: Sequence[Manifest]) -> Manifest:
    kind, own = part.kind, fleet.kubernetes
    prefix = f"{own.registry}/" if own.registry else ""
    image = f"{prefix}tailrace-{'engine' if kind in _WITH_VLLM else 'control'}:{__version__}"
    environment = {**part.spec.environment}
    if kind != "etcd":
        environment = {**environment_of(options, f"monitor:{PORTS['monitor']}"), **environment}
    fields = {"POD_NAME": "metadata.name", "POD_IP": "status.podIP"}
    fields |= {"NODE": f"metadata.labels['{_NODE_LABEL}']"} if kind == "ranks" else {}
    security: Manifest = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    if kind in _ENGINES and own.rdma:
        # Memory of RDMA is pinned.
        security["capabilities"]["add"] = ["IPC_LOCK"]
    container: Manifest = {
        "name": kind,
        "image": ETCD_IMAGE if kind == "etcd" else image,
        "command": [_escaped(word) for word in part.spec.command],
        "env": [
            *(
                {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
                for name, path in fields.items()
            ),
            *({"name": name, "value": _escaped(value)} for name, value in environment.items()),
        ],
    }
    if kind in (*_ENGINES, "frontend") and own.secret:
        container["envFrom"] = [{"secretRef": {"name": own.secret}}]
    if ports := _ports(fleet, kind):
        container["ports"] = [{"name": name, "containerPort": port} for name, port in ports.items()]
    return {
        **container,
        **_probes(fleet, options, part),
        **_before_stop(fleet, kind),
        "resources": _resources(fleet, options, kind),
        "securityContext": security,
        "volumeMounts": [*mounts],
    }


def _escaped(word: str) -> str:
    """Return a word in which Kubernetes expands nothing but what is the pod's own."""
    return "".join(
        part if _OWN.fullmatch(part) else part.replace("$(", "$$(") for part in _OWN.split(word) if part
    )


def _ports(fleet: Fleet, kind: str) -> dict[str, int]:
    """Return the ports of a kind of pod, by their names."""
    match kind:
        case "etcd":
            return {"client": CLIENT_PORT, "peer": PEER_PORT}
        case "console":
            return {"http": _CONSOLE_PORT}
        case "ranks":
            return {}
    ports = {"grpc": PORTS[kind], "metrics": PORTS[kind] + METRICS_ABOVE}
    if kind == "frontend":
        ports["http"] = parse_address(fleet.model.http)[1]
    return ports | ({"streams": STREAM_PORT} if kind == "worker" else {})


def _probes(fleet: Fleet, options: ClusterOptions, part: _Part) -> Manifest:
    """Return when a pod is started, takes requests, and is to be restarted.

    Nothing here ends a process that is slow or without its peers: one that makes no progress ends by itself.
    """
    kind, ports = part.kind, _ports(fleet, part.kind)
    ready: Manifest
    alive: Manifest

    def page(path: str, port: str, scheme: str) -> Manifest:
        return {"httpGet": {"path": path, "port": ports[port], "scheme": scheme.upper()}}

    match kind:
        case "ranks":
            return {}
        case "etcd":
            ready = alive = {"tcpSocket": {"port": CLIENT_PORT}}
        case "console":
            ready = alive = page("/health", "http", "http")
        case _:
            ready = {"grpc": {"port": ports["grpc"]}}
            alive = {"tcpSocket": {"port": ports["grpc"]}}
            if part.spec.role:
                # Kubernetes has no certificate.
                probe = ["python", "-m", "tailrace.service.probe", f"127.0.0.1:{ports['grpc']}"]
                ready = {"exec": {"command": [*probe, "--tls", _TLS]}}
    start = {"startupProbe": {**ready, **_PROBE, "failureThreshold": _START_TRIES}}
    if kind == "frontend":
        alive = page("/health", "http", options.scheme)
        if options.front is not Front.RUST:
            ready = page("/ready", "http", options.scheme)
        elif not part.spec.role:
            ready = page("/ready", "metrics", "http")
    return {
        **(start if kind in ("worker", "frontend") else {}),
        "readinessProbe": {**ready, **_PROBE},
        "livenessProbe": {**alive, **_ALIVE},
    }


def _before_stop(fleet: Fleet, kind: str) -> Manifest:
    """Return what happens before SIGTERM, which drains every service."""
    command: list[str] = []
    if kind == "frontend":
        command = ["sleep", str(_LEAVE_S)]
    elif kind == "worker" and _drains(fleet):
        tls = f" --tls {_OPERATOR_TLS}" if fleet.tls else ""
        drain = f'tailrace drain "$POD_NAME" --admin scheduler:{PORTS["scheduler"]}{tls}'
        # A drain belongs to the name: the set's next pod of this name would be drained.
        command = ["sh", "-c", f"{drain} --timeout {fleet.kubernetes.drain}; {drain} --undrain; true"]
    return {"lifecycle": {"preStop": {"exec": {"command": command}}}} if command else {}


def _resources(fleet: Fleet, options: ClusterOptions, kind: str) -> Manifest:
    if kind not in _ENGINES:
        return _FRONTEND if kind == "frontend" else _SMALL
    own = fleet.kubernetes
    gpus = own.gpus
    if gpus is None:
        gpus = options.ranks // own.nodes if options.engine is Engine.VLLM else 0
    devices = {own.gpu: gpus} if gpus else {}
    devices |= {own.rdma: 1} if own.rdma else {}
    return {
        "requests": {"cpu": own.cpu, "memory": own.memory, **devices},
        "limits": {"memory": own.memory, **devices},
    }


def _secrets(fleet: Fleet, certificates: Certificates, keys: str) -> Iterator[Manifest]:
    for identity, files in certificates.items():
        for prefix, folder in (("tls", ""), ("etcd", f"{FOR_ETCD}/")):
            data = {
                path.removeprefix(folder): base64.b64encode(text).decode()
                for path, text in files.items()
                if path.startswith(folder) and "/" not in path.removeprefix(folder)
            }
            if data:
                name = f"{prefix}-{identity.name}"
                yield _object("v1", "Secret", name, fleet, type="kubernetes.io/tls", data=data)
    if fleet.keys:
        yield _object("v1", "Secret", "keys", fleet, stringData={KEYS: keys})


def _certificates(fleet: Fleet) -> Iterator[Manifest]:
    """Yield what cert-manager makes the same certificates from as `tailrace certs` does: two authorities,
    and a certificate for each identity."""
    if fleet.kubernetes.certificates != "cert-manager":
        return

    def certificate(name: str, issuer: str, given: Manifest, rotation: str = "Always") -> Manifest:
        spec = {
            "secretName": name,
            "privateKey": {
                "algorithm": "ECDSA",
                "encoding": "PKCS8",
                "size": 256,
                "rotationPolicy": rotation,
            },
            "issuerRef": {"group": "cert-manager.io", "kind": "Issuer", "name": issuer},
            **given,
        }
        return _object("cert-manager.io/v1", "Certificate", name, fleet, spec=spec)

    def issuer(name: str, spec: Manifest) -> Manifest:
        return _object("cert-manager.io/v1", "Issuer", name, fleet, spec=spec)

    yield issuer("self-signed", {"selfSigned": {}})
    for name in ("authority", "etcd-authority"):
        given = {"isCA": True, "commonName": f"Tailrace {name}", "duration": "87600h"}
        yield certificate(name, "self-signed", given, "Never")
        yield issuer(name, {"ca": {"secretName": name}})
    names = {**identities(fleet), **{each: [] for each in OPERATORS}}
    for identity, hosts in names.items():
        role = identity.role
        serves = role in MEMBERS or role is Role.ETCD
        who = {"commonName": etcd_user(role), "uris": [identity.uri]}
        lasts = {"duration": "2160h", "renewBefore": "720h"}
        alternatives = {
            "dnsNames": [
                *([server_name(role)] if serves else []),
                *(each for each in hosts if not is_ip(each)),
            ],
            "ipAddresses": [each for each in hosts if is_ip(each)],
        }
        purposes = ["digital signature", *(["server auth"] if serves else []), "client auth"]
        given = {**who, **{key: each for key, each in alternatives.items() if each}, **lasts}
        signs = "etcd-authority" if role in (Role.ETCD, Role.ETCD_ROOT) else "authority"
        yield certificate(f"tls-{identity.name}", signs, {**given, "usages": purposes})
        if role in MEMBERS:
            given = {**who, **lasts, "usages": ["digital signature", "client auth"]}
            yield certificate(f"etcd-{identity.name}", "etcd-authority", given)


# Whose methods each gRPC service's are.
_SERVED_BY: Final = {
    "Admin": "scheduler",
    "Scheduler": "scheduler",
    "Monitor": "monitor",
    "TraceService": "monitor",
    "Migration": "migration",
    "Worker": "worker",
    "BidAsk": "worker",
    "Cache": "worker",
    "Answers": "frontend",
}


def _callers(fleet: Fleet, kind: str) -> list[str]:
    """Return the kinds of pods that call methods of a kind, by the table of who may (tailrace/security)."""
    roles = {
        role.value
        for method, allowed in METHODS.items()
        if _SERVED_BY.get(method.split("/")[1].rpartition(".")[2]) == kind
        for role in allowed
        if role in PORTS
    }
    if kind == "scheduler":
        roles |= {"console"} if fleet.kubernetes.console else set()
        roles |= {"worker"} if _drains(fleet) else set()
    return sorted(roles)


def _network(fleet: Fleet, parts: Sequence[_Part]) -> Iterator[Manifest]:
    """Yield who reaches which ports of each kind of pod; nobody reaches the others."""
    for part in parts:
        kind = part.kind
        rules = _rules(fleet, kind)
        if part.ranks is not None:
            # They use any free ports.
            rules.append(_rule(["worker", "ranks"]))
            yield _policy(fleet, "ranks", [_rule(["worker", "ranks"])])
        yield _policy(fleet, kind, rules)


def _policy(fleet: Fleet, kind: str, rules: list[Manifest]) -> Manifest:
    spec = {"podSelector": {"matchLabels": _labels(kind)}, "policyTypes": ["Ingress"], "ingress": rules}
    return _object("networking.k8s.io/v1", "NetworkPolicy", kind, fleet, spec=spec)


def _rule(kinds: Sequence[str] | None, *ports: int | range) -> Manifest:
    """Return a rule for these ports, or all; `kinds`: of pods that reach them, None: everybody."""
    rule: Manifest = {}
    if kinds is not None:
        component = {"key": _COMPONENT, "operator": "In", "values": [*kinds]}
        rule["from"] = [{"podSelector": {"matchLabels": _PART_OF, "matchExpressions": [component]}}]
    if ports:
        rule["ports"] = [
            {"protocol": "TCP", "port": each[0], "endPort": each[-1]}
            if isinstance(each, range)
            else {"protocol": "TCP", "port": each}
            for each in ports
        ]
    return rule


def _rules(fleet: Fleet, kind: str) -> list[Manifest]:
    if kind == "etcd":
        return [_rule(["etcd"], CLIENT_PORT, PEER_PORT), _rule([*PORTS], CLIENT_PORT)]
    if kind == "console":
        # For a port forwarded to it.
        return []
    rules = [_rule(_callers(fleet, kind), PORTS[kind])]
    # With TLS, Prometheus shows a certificate; without, add a rule for its namespace.
    rules += [_rule(None, PORTS[kind] + METRICS_ABOVE)] if fleet.tls else []
    if kind == "worker":
        rules += [_rule(["frontend"], STREAM_PORT), _rule(["worker"], _KV_PORTS)]
    if kind == "frontend":
        rules.append(_rule(None, parse_address(fleet.model.http)[1]))
    return rules


def _monitoring(fleet: Fleet, parts: Sequence[_Part], alerts: str) -> Iterator[Manifest]:
    """Yield what the Prometheus operator reads."""
    for part in parts:
        if part.kind not in PORTS:
            continue
        endpoint: Manifest = {"port": "metrics", "interval": "5s", "scrapeTimeout": "4s"}
        if part.kind == "monitor":
            # It speaks of instances by their ids: its label `instance` is kept, not taken for the target's.
            endpoint["honorLabels"] = True
        if fleet.tls:
            name = f"tls-{SCRAPER.name}"
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


def _most(fleet: Fleet) -> int:
    """Return the most instances that KEDA starts; 0: their number is fixed."""
    scale = fleet.model.autoscale
    return fleet.kubernetes.scale_to if scale is None else scale.max


def _scaled(fleet: Fleet, options: ClusterOptions) -> Manifest:
    """Return KEDA's object for as many instances as the scheduler asks for (docs/scaling.md)."""
    scale = fleet.model.autoscale
    least = fleet.model.number if scale is None else scale.min
    still = {"stabilizationWindowSeconds": 0}
    trigger = {
        "type": "prometheus",
        "metricType": "AverageValue",
        "metadata": {
            "serverAddress": fleet.kubernetes.prometheus,
            "query": f'max(tailrace_desired_instances{{model="{options.model}"}})',
            "threshold": "1",
            "ignoreNullValues": "false",
        },
    }
    scaled = ("apps/v1", "StatefulSet")
    if fleet.kubernetes.nodes > 1:
        scaled = ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet")
    spec = {
        "scaleTargetRef": {"apiVersion": scaled[0], "kind": scaled[1], "name": "worker"},
        "minReplicaCount": least,
        "maxReplicaCount": _most(fleet),
        "pollingInterval": _POLLING_S if least else _POLLING_AT_ZERO_S,
        # To zero; it is in the metric, too.
        **({} if least else {"cooldownPeriod": 0}),
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
    namespace, _, name = fleet.kubernetes.gateway.rpartition("/")
    gateway = {"name": name, **({"namespace": namespace} if namespace else {})}
    spec = {"parentRefs": [gateway], "rules": [rule]}
    return _object("gateway.networking.k8s.io/v1", "HTTPRoute", "frontend", fleet, spec=spec)
