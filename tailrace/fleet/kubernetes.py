"""The objects of a fleet on Kubernetes, from the same plan as its processes elsewhere. Pure."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import yaml

from tailrace import __version__
from tailrace.address import is_ip, parse_address
from tailrace.fleet.file import Fleet, FleetError, Kubernetes, Model
from tailrace.fleet.folders import CONTAINER_USER, ETCD_IMAGE, KEYS, SCRAPER, stop_s
from tailrace.fleet.hosts import (
    EDGE_PORT,
    HTTP_PORT,
    KV_PORT,
    METRICS_ABOVE,
    PORTS,
    STREAM_PORT,
    for_edges,
    require_free,
)
from tailrace.local.certificates import span_certificates
from tailrace.local.options import Bounds, ClusterOptions, Engine, Front
from tailrace.local.plan import (
    PartSpec,
    Tier,
    environment_of,
    frontend_part,
    own_clusters,
    scheduler_arguments,
    worker_part,
)
from tailrace.security.access import METHODS
from tailrace.security.credentials import AUTHORITIES, CERTIFICATE, FOR_ETCD, KEY
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
# Of an HPA.
_STABILIZATION_MAX_S: Final = 3_600
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
_CONTROL: Final = ("scheduler", "monitor", "migration")
_ENGINES: Final = ("worker", "ranks")
_FOR_USERS: Final = ("frontend", "edge")
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


def identities(fleet: Fleet, options: ClusterOptions) -> dict[Identity, list[str]]:
    """Return whose certificates the pods need, with the host names in them. Pods of a kind share one."""
    if not fleet.tls:
        return {}
    own = fleet.kubernetes
    # Of clusters of single models, too: spans are sent to a name.
    prefixes = ["", *own_clusters(options).values()]
    names = {
        Identity(Role(kind), kind): [f"{prefix}{kind}" for prefix in (prefixes if kind in _CONTROL else [""])]
        for kind in _ports_of(fleet)
    }
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
    parts = [*_parts(fleet, options)]
    documents = {
        "namespace.yaml": [_object("v1", "Namespace", fleet.kubernetes.namespace, fleet, namespaced=False)],
        SECRETS: [*_secrets(fleet, certificates, keys)],
        "certificates.yaml": [*_certificates(fleet, options)],
        "fleet.yaml": [each for part in parts for each in _workload(fleet, part)],
        "network.yaml": [*_network(fleet, parts)],
        "monitoring.yaml": [*_monitoring(fleet, options, parts, alerts)],
        "scaling.yaml": [*_scaled(fleet, options, parts)],
        "route.yaml": [_route(fleet)] if fleet.kubernetes.gateway else [],
    }
    return {name: each for name, each in documents.items() if each}


def require_possible(fleet: Fleet, options: ClusterOptions) -> None:
    """Raise FleetError, which names the field."""
    own = fleet.kubernetes
    if fleet.hosts:
        raise FleetError("hosts: Kubernetes chooses the machines: leave hosts out")
    for at, (model, each) in enumerate(zip(fleet.models, options.models, strict=True)):
        _require_model(fleet, f"models[{at}]", model, each)
    for field, http in fleet.users[:1]:
        listen, port = parse_address(http)
        if listen not in ("0.0.0.0", "::"):
            raise FleetError(f"{field}: write 0.0.0.0:{port}: a pod cannot listen on {listen} for others")
        require_free(field, port, [_ports_of(fleet)["edge" if fleet.http else "frontend"]])
    if not (fleet.tls or fleet.insecure):
        raise FleetError("tls: pods need tls: true (or insecure: true in a network of yours alone)")
    if own.scale_to and len(fleet.models) > 1:
        raise FleetError("kubernetes.scale_to: of several models, autoscale of each says it")
    if own.scale_to and fleet.model.autoscale is not None:
        raise FleetError("kubernetes.scale_to: models[0].autoscale.max says it")
    if fleet.model.number is not None and 0 < own.scale_to < fleet.model.number:
        raise FleetError("kubernetes.scale_to: fewer than models[0].replicas")
    if own.certificates == "cert-manager" and not fleet.tls:
        raise FleetError("kubernetes.certificates: cert-manager needs tls: true")
    for at, (model, each) in enumerate(zip(fleet.models, options.models, strict=True)):
        field = "kubernetes.nodes" if model.kubernetes.nodes is None else f"models[{at}].kubernetes.nodes"
        _require_nodes(fleet, field, model, each)


def _require_model(fleet: Fleet, field: str, model: Model, options: ClusterOptions) -> None:
    if model.number is None:
        raise FleetError(f"{field}.replicas: how many instances?")
    if model.front is Front.BOTH:
        raise FleetError(f"{field}.front: both: on one machine only; python, or rust")
    if not isinstance(model.frontends, int):
        raise FleetError(f"{field}.frontends: a number: Kubernetes chooses the machines")
    if options.prefix[:1].isdigit():
        raise FleetError(
            f"{field}.flags: served-model-name: its first name is that of Services, which begin with a letter"
        )


def _require_nodes(fleet: Fleet, field: str, model: Model, options: ClusterOptions) -> None:
    nodes = fleet.pods_of(model).nodes
    if nodes == 1:
        return
    if model.engine is Engine.SIMULATED:
        raise FleetError(f"{field}: a simulated engine is one process")
    if options.ranks % nodes or options.ranks == 1:
        raise FleetError(
            f"{field}: {options.ranks} ranks (tensor x pipeline parallel) cannot be divided among {nodes} "
            "pods"
        )
    if not fleet.insecure:
        raise FleetError(
            f"insecure: true is needed with {field}, even with tls: ranks on several pods speak "
            "to each other unencrypted (docs/security.md)"
        )


@dataclass(frozen=True, slots=True)
class _Part:
    """The pods of one kind: of one model, of one cluster, or of the fleet."""

    # Its name is theirs.
    spec: PartSpec
    count: int
    # What Kubernetes has to know about them.
    own: Kubernetes
    # The options of their model, or of the first one.
    options: ClusterOptions
    # What the names of the control services of their cluster begin with.
    cluster: str = ""
    # Whether their number is somebody else's to set, and the most of them.
    most: int = 0
    # Of each, on further pods.
    ranks: _Part | None = None

    @property
    def kind(self) -> str:
        return self.spec.kind

    @property
    def name(self) -> str:
        return self.spec.name


def _parts(fleet: Fleet, options: ClusterOptions) -> Iterator[_Part]:
    own = fleet.kubernetes
    keys = ("--api-keys", f"{_KEYS}/{KEYS}") if fleet.keys else ()

    def of_fleet(spec: PartSpec, count: int, cluster: str = "") -> _Part:
        return _Part(spec, count, own, options, cluster)

    if isinstance(own.etcd, int):
        tls = Path(_TLS) if fleet.tls else None
        command = member_command(
            "etcd", Path("/var/lib/etcd/data"), _member(fleet, _ID), _members(fleet), tls
        )
        yield of_fleet(PartSpec("etcd", Tier.ETCD, command, "", role=_role(fleet, "etcd")), own.etcd)
    clusters = {fleet.cluster: "", **own_clusters(options)}
    for cluster, prefix in clusters.items():
        service = partial(_service, fleet, cluster)
        journal = f"{_DATA}/migrations.jsonl"
        following = scheduler_arguments(_bounds_of(fleet, options, cluster))
        yield of_fleet(service("monitor", f"{prefix}monitor", Tier.CONTROL), 1, prefix)
        yield of_fleet(
            service("migration", f"{prefix}migration", Tier.CONTROL, "--journal", journal), 1, prefix
        )
        yield of_fleet(
            service("scheduler", f"{prefix}scheduler", Tier.CONTROL, *following),
            fleet.schedulers,
            prefix,
        )
    for model, each in zip(fleet.models, options.models, strict=True):
        cluster = _cluster_of(fleet, each)
        service, prefix = partial(_service, fleet, cluster), clusters[cluster]
        yield _worker(fleet, model, each, service, prefix)
        with_keys = replace(each, frontend_arguments=(*each.frontend_arguments, *keys))
        if fleet.http and fleet.tls:
            with_keys = replace(with_keys, line=for_edges(with_keys, _TLS))
        http = f"0.0.0.0:{HTTP_PORT}" if fleet.http else model.http
        spec = frontend_part(with_keys, service, f"{each.prefix}frontend", http)
        assert isinstance(model.frontends, int)
        yield _Part(spec, model.frontends, fleet.pods_of(model), with_keys, prefix)
    if fleet.http:
        arguments = ("--http", fleet.http, *keys)
        yield of_fleet(_service(fleet, fleet.cluster, "edge", "edge", Tier.EDGE, *arguments), own.edges)
    if own.console:
        command = ["tailrace", "serve", "console", "--http", f"0.0.0.0:{_CONSOLE_PORT}"]
        command += ["--admin", f"scheduler:{PORTS['scheduler']}", "--token-file", f"{_DATA}/console.token"]
        command += ["--tls", _TLS] if fleet.tls else []
        yield of_fleet(PartSpec("console", Tier.CONSOLE, command, "", role=_role(fleet, "console")), 1)


def _role(fleet: Fleet, kind: str) -> str:
    return kind if fleet.tls else ""


def _cluster_of(fleet: Fleet, options: ClusterOptions) -> str:
    return options.own.name if options.own else fleet.cluster


def _bounds_of(fleet: Fleet, options: ClusterOptions, cluster: str) -> list[Bounds]:
    """Return the bounds of those models of a cluster whose instances follow their load."""
    models = [each for each in options.models if _cluster_of(fleet, each) == cluster]
    return [each.bounds for each in models if each.bounds is not None]


def _ports_of(fleet: Fleet) -> dict[str, int]:
    """Return the gRPC ports of the services, by kind."""
    return {**PORTS, "edge": EDGE_PORT} if fleet.http else {**PORTS}


def _worker(
    fleet: Fleet, model: Model, options: ClusterOptions, service: Callable[..., PartSpec], cluster: str
) -> _Part:
    """Return the pods of a model's instances."""
    arguments = ["--stream-port", str(STREAM_PORT), "--kv-ports", f"{_KV_PORTS[0]}-{_KV_PORTS[-1]}"]
    own, number = fleet.pods_of(model), model.number
    assert number is not None
    ranks = None
    if own.nodes > 1:
        arguments += ["--nnodes", str(own.nodes), "--master-addr", _ADDRESS]
        arguments += ["--master-port", str(_RANKS_PORT)]
        command = ["tailrace", "serve", "ranks", "--worker", f"{_LEADER}:{_RANKS_PORT}"]
        spec = PartSpec(f"{options.prefix}ranks", Tier.WORKER, [*command, "--node", _NODE, "--insecure"], "")
        ranks = _Part(spec, own.nodes - 1, own, options, cluster)

    def planned(kind: str, name: str, tier: Tier, *rest: str) -> PartSpec:
        return service(kind, name, tier, *arguments, *rest)

    name = f"{options.prefix}worker"
    spec = replace(worker_part(options, planned, name, range(1)), name=name)
    return _Part(spec, number, own, options, cluster, _most(fleet, model), ranks)


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


def _service(fleet: Fleet, cluster: str, kind: str, name: str, tier: Tier, *arguments: str) -> PartSpec:
    """Plan a service of a cluster. Each pod has an address of its own, so that ports are fixed."""
    port = _ports_of(fleet)[kind]
    command = ["tailrace", "serve", kind, "--etcd", ",".join(endpoints(fleet))]
    command += ["--cluster", cluster, "--listen", f"0.0.0.0:{port}"]
    command += ["--metrics", f"0.0.0.0:{port + METRICS_ABOVE}", "--id", _ID, "--advertise", _ADDRESS]
    command += ["--tls", _TLS] if fleet.tls else []
    command += ["--insecure"] if fleet.insecure_for(kind) else []
    environment = span_certificates(_TLS) if fleet.tls else {}
    return PartSpec(
        name,
        tier,
        [*command, *arguments],
        f"{_ADDRESS}:{port}",
        environment=environment,
        role=_role(fleet, kind),
    )


def _object(api: str, kind: str, name: str, fleet: Fleet, namespaced: bool = True, **rest: Any) -> Manifest:
    metadata: Manifest = {"name": name}
    if namespaced:
        metadata["namespace"] = fleet.kubernetes.namespace
    metadata["labels"] = {**_PART_OF, "app.kubernetes.io/version": __version__}
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **rest}


def _labels(part: _Part) -> dict[str, str]:
    return {**_PART_OF, _COMPONENT: part.name}


def _workload(fleet: Fleet, part: _Part) -> Iterator[Manifest]:
    """Yield the pods of a kind, how they are reached, and how many may be away at once."""
    kind, name, own = part.kind, part.name, part.own
    selector = {"matchLabels": _labels(part)}
    template = {"metadata": {"labels": _labels(part)}, "spec": _pod(fleet, part)}
    # Who scales sets it.
    count = {} if part.most else {"replicas": part.count}
    if part.ranks is not None:
        yield _leader_set(fleet, part, part.ranks, template, count)
    elif kind in ("etcd", "worker"):
        # A worker keeps its id, and the last one is the first to go.
        spec: Manifest = {**count, "selector": selector, "serviceName": name}
        spec["podManagementPolicy"] = "Parallel"
        if kind == "etcd":
            size = {"requests": {"storage": own.storage}}
            claim: Manifest = {"accessModes": ["ReadWriteOnce"], "resources": size}
            claim |= {"storageClassName": own.storage_class} if own.storage_class else {}
            spec["volumeClaimTemplates"] = [{"metadata": {"name": "etcd"}, "spec": claim}]
        yield _object("apps/v1", "StatefulSet", name, fleet, spec={**spec, "template": template})
    else:
        # One more before one less.
        strategy = {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
        spec = {**count, "selector": selector, "strategy": strategy, "template": template}
        yield _object("apps/v1", "Deployment", name, fleet, spec=spec)
    # A LeaderWorkerSet has a Service of its own, and edges find front ends in etcd.
    alone = kind in ("migration", "console") or part.ranks is not None
    if not alone and not (kind == "frontend" and fleet.http):
        yield _reached(fleet, part)
    if max(part.count, part.most) > 1:
        budget = {"maxUnavailable": 1, "selector": selector}
        yield _object("policy/v1", "PodDisruptionBudget", name, fleet, spec=budget)


def _leader_set(fleet: Fleet, part: _Part, ranks: _Part, leader: Manifest, count: Manifest) -> Manifest:
    """Return instances that span pods: the first has the engine core, the others its further ranks."""
    template = {"metadata": {"labels": _labels(ranks)}, "spec": _pod(fleet, ranks)}
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
    return _object("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", part.name, fleet, spec=spec)


def _reached(fleet: Fleet, part: _Part) -> Manifest:
    """Return the service in front of pods. Pods find each other in etcd: these are for names, and for
    people."""
    kind, ports = part.kind, _ports(part)
    names = {"etcd": ["client", "peer"], "frontend": ["http"], "edge": ["http"]}.get(kind, ["grpc"])
    spec: Manifest = {
        "selector": _labels(part),
        "ports": [{"name": name, "port": ports[name]} for name in names],
    }
    if kind in ("etcd", "worker"):
        # Members look for each other before they are ready.
        spec |= {"clusterIP": "None", "publishNotReadyAddresses": True}
    if kind in _FOR_USERS:
        spec["type"] = part.own.service
    return _object("v1", "Service", part.name, fleet, spec=spec)


def _pod(fleet: Fleet, part: _Part) -> Manifest:
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
    if kind == "worker" and fleet.kubernetes.drain and fleet.tls:
        mount("operator", _OPERATOR_TLS, _certificate_volume(_DRAINER.name), read_only=True)
    if kind in _FOR_USERS and fleet.keys:
        keys = {"secretName": "keys", "defaultMode": 0o440}
        mount("keys", _KEYS, {"secret": keys}, read_only=True)
    if kind in _ENGINES:
        mount("shm", "/dev/shm", {"emptyDir": {"medium": "Memory"}})
    if kind in (*_ENGINES, "frontend") and (claim := fleet.kubernetes.models):
        mount("models", _MODELS, {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}}, True)
    drain_s = fleet.kubernetes.drain if kind == "worker" else _LEAVE_S if kind in _FOR_USERS else 0
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
        "containers": [_container(fleet, part, mounts)],
        "volumes": volumes,
    }
    if kind in _ports_of(fleet) or kind == "etcd":
        # KV moves between workers: not away from each other's zone.
        spec["topologySpreadConstraints"] = [
            {
                "maxSkew": 1,
                "topologyKey": key,
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": _labels(part)},
            }
            for key in (_SPREAD[:1] if kind == "worker" else _SPREAD)
        ]
    return spec


def _certificate_volume(name: str) -> Manifest:
    """Return the folder of a certificate, and the one for etcd in it, from their secrets."""
    files = [AUTHORITIES, CERTIFICATE, KEY]
    sources = [{"secret": {"name": f"tls-{name}", "items": [{"key": each, "path": each} for each in files]}}]
    if name in MEMBERS:
        items = [{"key": each, "path": f"{FOR_ETCD}/{each}"} for each in files]
        sources.append({"secret": {"name": f"etcd-{name}", "items": items}})
    return {"projected": {"defaultMode": 0o440, "sources": sources}}


def _container(fleet: Fleet, part: _Part, mounts: Sequence[Manifest]) -> Manifest:
    kind, own = part.kind, part.own
    prefix = f"{own.registry}/" if own.registry else ""
    image = f"{prefix}tailrace-{'engine' if kind in _WITH_VLLM else 'control'}:{__version__}"
    environment = {**part.spec.environment}
    if kind != "etcd":
        monitor = f"{part.cluster}monitor:{PORTS['monitor']}"
        environment = {**environment_of(part.options, monitor), **environment}
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
        "name": part.name,
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
    if ports := _ports(part):
        container["ports"] = [{"name": name, "containerPort": port} for name, port in ports.items()]
    return {
        **container,
        **_probes(fleet, part),
        **_before_stop(fleet, part),
        "resources": _resources(part),
        "securityContext": security,
        "volumeMounts": [*mounts],
    }


def _escaped(word: str) -> str:
    """Return a word in which Kubernetes expands nothing but what is the pod's own."""
    return "".join(
        part if _OWN.fullmatch(part) else part.replace("$(", "$$(") for part in _OWN.split(word) if part
    )


def _ports(part: _Part) -> dict[str, int]:
    """Return the ports of a kind of pod, by their names."""
    match part.kind:
        case "etcd":
            return {"client": CLIENT_PORT, "peer": PEER_PORT}
        case "console":
            return {"http": _CONSOLE_PORT}
        case "ranks":
            return {}
    port = parse_address(part.spec.address)[1]
    ports = {"grpc": port, "metrics": port + METRICS_ABOVE}
    if http := part.spec.option("--http"):
        ports["http"] = parse_address(http)[1]
    return ports | ({"streams": STREAM_PORT} if part.kind == "worker" else {})


def _probes(fleet: Fleet, part: _Part) -> Manifest:
    """Return when a pod is started, takes requests, and is to be restarted.

    Nothing here ends a process that is slow or without its peers: one that makes no progress ends by itself.
    """
    kind, ports = part.kind, _ports(part)
    ready: Manifest
    alive: Manifest

    def page(path: str, port: str, scheme: str) -> Manifest:
        return {"httpGet": {"path": path, "port": ports[port], "scheme": scheme.upper()}}

    match kind:
        case "ranks":
            return {}
        case "etcd":
            ready = alive = {"tcpSocket": {"port": CLIENT_PORT}}
        case "console" | "edge":
            # Not an edge's /ready: without an instance, its clients get a reason and not a closed port, and
            # requests are what starts an instance of a model that is scaled to zero.
            ready = alive = page("/health", "http", "http")
        case _:
            ready = {"grpc": {"port": ports["grpc"]}}
            alive = {"tcpSocket": {"port": ports["grpc"]}}
            if part.spec.role:
                # Kubernetes has no certificate.
                probe = ["python", "-m", "tailrace.service.probe", f"127.0.0.1:{ports['grpc']}"]
                ready = {"exec": {"command": [*probe, "--tls", _TLS]}}
    start = {"startupProbe": {**ready, **_PROBE, "failureThreshold": _START_TRIES}}
    if kind == "frontend" and fleet.http and fleet.tls:
        # It takes nobody without a certificate; edges see whether it answers.
        alive = {"tcpSocket": {"port": ports["http"]}}
    elif kind == "frontend":
        scheme = part.options.scheme
        alive = page("/health", "http", scheme)
        if part.options.front is not Front.RUST:
            ready = page("/ready", "http", scheme)
        elif not part.spec.role:
            ready = page("/ready", "metrics", "http")
    return {
        **(start if kind in ("worker", "frontend") else {}),
        "readinessProbe": {**ready, **_PROBE},
        "livenessProbe": {**alive, **_ALIVE},
    }


def _before_stop(fleet: Fleet, part: _Part) -> Manifest:
    """Return what happens before SIGTERM, which drains every service."""
    command: list[str] = []
    if part.kind in _FOR_USERS:
        command = ["sleep", str(_LEAVE_S)]
    elif part.kind == "worker" and (seconds := fleet.kubernetes.drain):
        tls = f" --tls {_OPERATOR_TLS}" if fleet.tls else ""
        admin = f"{part.cluster}scheduler:{PORTS['scheduler']}"
        drain = f'tailrace drain "$POD_NAME" --admin {admin}{tls}'
        # A drain belongs to the name: the set's next pod of this name would be drained.
        command = ["sh", "-c", f"{drain} --timeout {seconds}; {drain} --undrain; true"]
    return {"lifecycle": {"preStop": {"exec": {"command": command}}}} if command else {}


def _resources(part: _Part) -> Manifest:
    if part.kind not in _ENGINES:
        return _FRONTEND if part.kind in _FOR_USERS else _SMALL
    own, options = part.own, part.options
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


def _certificates(fleet: Fleet, options: ClusterOptions) -> Iterator[Manifest]:
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
    names = {**identities(fleet, options), **{each: [] for each in OPERATORS}}
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
    "Usage": "frontend",
}


def _callers(fleet: Fleet, kind: str) -> list[str]:
    """Return the kinds of pods that call methods of a kind, by the table of who may (tailrace/security)."""
    roles = {
        role.value
        for method, allowed in METHODS.items()
        if _SERVED_BY.get(method.split("/")[1].rpartition(".")[2]) == kind
        for role in allowed
        if role in _ports_of(fleet)
    }
    if kind == "scheduler":
        roles |= {"console"} if fleet.kubernetes.console else set()
        roles |= {"worker"} if fleet.kubernetes.drain else set()
    return sorted(roles)


def _network(fleet: Fleet, parts: Sequence[_Part]) -> Iterator[Manifest]:
    """Yield who reaches which ports of each kind of pod; nobody reaches the others."""
    for part in parts:
        rules = _rules(fleet, part, parts)
        if part.ranks is not None:
            # They use any free ports.
            group = [part.name, part.ranks.name]
            rules.append(_rule(group))
            yield _policy(fleet, part.ranks, [_rule(group)])
        yield _policy(fleet, part, rules)


def _policy(fleet: Fleet, part: _Part, rules: list[Manifest]) -> Manifest:
    spec = {"podSelector": {"matchLabels": _labels(part)}, "policyTypes": ["Ingress"], "ingress": rules}
    return _object("networking.k8s.io/v1", "NetworkPolicy", part.name, fleet, spec=spec)


def _rule(names: Sequence[str] | None, *ports: int | range) -> Manifest:
    """Return a rule for these ports, or all; `names`: of pods that reach them, None: everybody."""
    rule: Manifest = {}
    if names is not None:
        component = {"key": _COMPONENT, "operator": "In", "values": [*names]}
        rule["from"] = [{"podSelector": {"matchLabels": _PART_OF, "matchExpressions": [component]}}]
    if ports:
        rule["ports"] = [
            {"protocol": "TCP", "port": each[0], "endPort": each[-1]}
            if isinstance(each, range)
            else {"protocol": "TCP", "port": each}
            for each in ports
        ]
    return rule


def _rules(fleet: Fleet, part: _Part, parts: Sequence[_Part]) -> list[Manifest]:
    kind, ports = part.kind, _ports(part)
    if kind == "console":
        # For a port forwarded to it.
        return []

    def of(*kinds: str) -> list[str]:
        """Return the names of pods of these kinds in the same cluster, and of those that serve all."""
        shared = {"scheduler": "console", "frontend": "edge"}.get(kind, "")
        return [
            each.name
            for each in _of_kinds(kinds, parts)
            if each.cluster == part.cluster or each.kind == shared
        ]

    if kind == "etcd":
        members = [each.name for each in _of_kinds([*_ports_of(fleet)], parts)]
        return [_rule(["etcd"], CLIENT_PORT, PEER_PORT), _rule(members, CLIENT_PORT)]
    rules = []
    if callers := _callers(fleet, kind):
        rules.append(_rule(of(*callers), ports["grpc"]))
    # With TLS, Prometheus shows a certificate; without, add a rule for its namespace.
    rules += [_rule(None, ports["metrics"])] if fleet.tls else []
    if kind == "worker":
        rules += [_rule(of("frontend"), STREAM_PORT), _rule(of("worker"), _KV_PORTS)]
    if kind in _FOR_USERS:
        rules.append(_rule(["edge"] if kind == "frontend" and fleet.http else None, ports["http"]))
    return rules


def _of_kinds(kinds: Sequence[str], parts: Sequence[_Part]) -> list[_Part]:
    """Return the pods of these kinds, in the order of these."""
    return [part for kind in kinds for part in parts if part.kind == kind]


def _monitoring(
    fleet: Fleet, options: ClusterOptions, parts: Sequence[_Part], alerts: str
) -> Iterator[Manifest]:
    """Yield what the Prometheus operator reads."""
    for part in parts:
        if part.kind not in _ports_of(fleet):
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
        if own_clusters(options):
            # By which alerts tell apart which one lacks a leader.
            cluster = {"targetLabel": "cluster", "replacement": part.spec.option("--cluster")}
            endpoint["relabelings"].append(cluster)
        spec = {"selector": {"matchLabels": _labels(part)}, "podMetricsEndpoints": [endpoint]}
        yield _object("monitoring.coreos.com/v1", "PodMonitor", part.name, fleet, spec=spec)
    rules = yaml.safe_load(alerts)
    yield _object("monitoring.coreos.com/v1", "PrometheusRule", "alerts", fleet, spec=rules)


def _most(fleet: Fleet, model: Model) -> int:
    """Return the most instances that KEDA starts; 0: their number is fixed."""
    return fleet.kubernetes.scale_to if model.autoscale is None else model.autoscale.max


def _scaled(fleet: Fleet, options: ClusterOptions, parts: Sequence[_Part]) -> Iterator[Manifest]:
    """Yield KEDA's objects for as many instances as the schedulers ask for (docs/scaling.md)."""
    for part in parts:
        if not part.most:
            continue
        bounds = part.options.bounds
        least = part.count if bounds is None else bounds.least
        # The cool-down is in the metric, that of the model of the cluster which has the shortest one.
        together = _bounds_of(fleet, options, part.spec.option("--cluster"))
        shortest_s = min((each.cooldown_s for each in together), default=0.0)
        hold_s = 0 if bounds is None else round(bounds.cooldown_s - shortest_s)
        behavior = {
            "scaleUp": {"stabilizationWindowSeconds": 0},
            "scaleDown": {"stabilizationWindowSeconds": min(hold_s, _STABILIZATION_MAX_S)},
        }
        cluster = f'cluster="{part.spec.option("--cluster")}",' if own_clusters(options) else ""
        trigger = {
            "type": "prometheus",
            "metricType": "AverageValue",
            "metadata": {
                "serverAddress": fleet.kubernetes.prometheus,
                "query": f'max(tailrace_desired_instances{{{cluster}model="{part.options.model}"}})',
                "threshold": "1",
                "ignoreNullValues": "false",
            },
        }
        scaled = ("apps/v1", "StatefulSet")
        if part.ranks is not None:
            scaled = ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet")
        spec = {
            "scaleTargetRef": {"apiVersion": scaled[0], "kind": scaled[1], "name": part.name},
            "minReplicaCount": least,
            "maxReplicaCount": part.most,
            "pollingInterval": _POLLING_S if least else _POLLING_AT_ZERO_S,
            # To zero.
            **({} if least else {"cooldownPeriod": hold_s}),
            "advanced": {"horizontalPodAutoscalerConfig": {"behavior": behavior}},
            "triggers": [trigger],
        }
        yield _object("keda.sh/v1alpha1", "ScaledObject", part.name, fleet, spec=spec)


def _route(fleet: Fleet) -> Manifest:
    to = "edge" if fleet.http else "frontend"
    backend = {"name": to, "port": parse_address(fleet.users[0][1])[1]}
    # A stream may last as long as it likes.
    rule = {"backendRefs": [backend], "timeouts": {"request": "0s"}}
    namespace, _, name = fleet.kubernetes.gateway.rpartition("/")
    gateway = {"name": name, **({"namespace": namespace} if namespace else {})}
    spec = {"parentRefs": [gateway], "rules": [rule]}
    return _object("gateway.networking.k8s.io/v1", "HTTPRoute", to, fleet, spec=spec)
