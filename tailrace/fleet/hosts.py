"""What each host of a fleet runs: the same parts as those of a local cluster, on fixed ports. Pure."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final

from tailrace.address import format_address, is_ip, listen_address, parse_address
from tailrace.fleet.file import MODELS_MAX, WORKERS_MAX, Fleet, FleetError, Host
from tailrace.local.certificates import certificate_folder, span_certificates
from tailrace.local.options import ClusterOptions, Engine, Front
from tailrace.local.plan import (
    PartSpec,
    Plan,
    Tier,
    environment_of,
    frontend_part,
    own_clusters,
    spans_to,
    worker_part,
)
from tailrace.security.credentials import AUTHORITIES, CERTIFICATE, KEY
from tailrace.security.options import exposed
from tailrace.security.roles import Role
from tailrace.service.etcd import CLIENT_PORT, PEER_PORT, Member, member_command
from tailrace.service.vllm_line import VllmLine

METRICS_ABOVE: Final = 2000
"""A service's metrics are on its own port plus this."""
PORTS: Final = {"scheduler": 7101, "monitor": 7102, "migration": 7103, "frontend": 7104, "worker": 7105}
"""gRPC ports of the services, of the first one of a kind on a host."""
EDGE_PORT: Final = 7185
"""gRPC port of an edge."""
# The second front end of a host is one above.
_FURTHER_FRONTENDS: Final = 7185
_FRONTENDS_MAX: Final = 20
STREAM_PORT: Final = 7205
"""Of the message streams of a host's first worker."""
KV_PORT: Final = 7300
"""The first of a host's ports for KV."""
# One for each network device.
_KV_EACH: Final = 8
# Of the control services of models that have clusters of their own, in the order of the file.
_FURTHER_CONTROL: Final = KV_PORT + _KV_EACH * WORKERS_MAX
_CONTROL: Final = ("scheduler", "monitor", "migration")
# Of all services; their metrics are above.
_OWN: Final = range(7101, _FURTHER_CONTROL + len(_CONTROL) * MODELS_MAX)
HTTP_PORT: Final = 8101
"""Of a host's first front end behind an edge; those of the others follow."""
_ETCD_TIMEOUT_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class Installation:
    """Where things are on a host: the commands, and the folders of data and certificates."""

    tailrace: Sequence[str]
    etcd: str
    data: str
    certificates: str
    # Users' API keys; empty: none.
    keys: str = ""


ANYWHERE: Final = Installation(["tailrace"], "etcd", "", "")
"""For plans of which only names and addresses count."""


def replicas(fleet: Fleet, options: ClusterOptions) -> list[dict[str, int]]:
    """Return the number of each model's instances on each host.

    Raise FleetError if GPUs are too few, or the ports of a host for its instances. Instances of the only
    model may share GPUs, if its flags say how much of their memory each takes.
    """
    models, several = options.models, len(fleet.models) > 1
    free = {name: host.gpus for name, host in fleet.hosts.items()}
    spread: list[dict[str, int]] = [{} for _ in models]
    # First those that say where, then those that say how many; the others share what these leave.
    kinds = [isinstance(model.replicas, Mapping) + 2 * (model.number is not None) for model in fleet.models]
    order = [at for kind in (1, 2, 0) for at in range(len(models)) if kinds[at] == kind]
    for done, at in enumerate(order):
        sharing = 1 if kinds[at] else len(order) - done
        shares = {name: gpus // sharing for name, gpus in free.items()}
        spread[at] = _spread(fleet, at, models[at], shares)
        if models[at].engine is Engine.VLLM:
            free = {name: gpus - spread[at][name] * models[at].ranks for name, gpus in free.items()}
    for name, host in fleet.hosts.items():
        total = 0
        for at, each in enumerate(spread):
            total += each[name]
            if total > WORKERS_MAX:
                raise FleetError(
                    f"models[{at}].replicas: {total} of them would be on host {name}, "
                    f"which has ports for {WORKERS_MAX}"
                )
        if not host.gpus or free[name] >= 0:
            continue
        taken = host.gpus - free[name]
        if several:
            last = max(at for at in order if spread[at][name] and models[at].engine is Engine.VLLM)
            raise FleetError(
                f"models[{last}].replicas: host {name} has {host.gpus} GPUs, and with it the models' "
                f"instances there take {taken}: say how many are on which host"
            )
        # Those that share a GPU (tailrace/local/plan.py) have so much less memory that it has to be meant.
        sharing_flags = ("gpu_memory_utilization", "kv_cache_memory_bytes")
        if models[0].ranks > host.gpus or not any(models[0].line.last(name) for name in sharing_flags):
            fits = host.gpus // models[0].ranks
            raise FleetError(
                f"models[0].replicas: host {name} has {host.gpus} GPUs, and its instances take {taken}: "
                f"at most {fits}" + (_SHARED if fits else "")
            )
    return spread


_SHARED: Final = ", or with gpu-memory-utilization or kv-cache-memory-bytes in flags they share them"


def _spread(fleet: Fleet, at: int, options: ClusterOptions, gpus: Mapping[str, int]) -> dict[str, int]:
    """Return the number of a model's instances on each host. `gpus`: those that it may take."""
    given = fleet.models[at].replicas
    if isinstance(given, Mapping):
        return {name: given.get(name, 0) for name in fleet.hosts}
    places = {name: max(0, number) // options.ranks for name, number in gpus.items()}
    if not any(places.values()):
        if any(host.gpus for host in fleet.hosts.values()) and options.engine is Engine.VLLM:
            problem = f"an instance takes {options.ranks} GPUs, and no host has as many"
            left = " left" if len(fleet.models) > 1 else ""
            raise FleetError(f"models[{at}].replicas: {problem}{left}")
        places = dict.fromkeys(fleet.hosts, 1)
    if given is None:
        return places
    shares = dict.fromkeys(places, 0)
    free = [name for name, number in places.items() if number]
    for _ in range(given):
        # To the host whose places are used least.
        shares[min(free, key=lambda name: shares[name] / places[name])] += 1
    return shares


def frontends(fleet: Fleet) -> list[dict[str, int]]:
    """Return the number of each model's front ends on each host. Raise FleetError if a host has too many."""
    first = edges(fleet)[0] if fleet.http else control_hosts(fleet)[0]
    spread = []
    for model in fleet.models:
        given = model.frontends if isinstance(model.frontends, Mapping) else {first: model.frontends}
        spread.append({name: given.get(name, 0) for name in fleet.hosts})
    for name in fleet.hosts:
        total = sum(each[name] for each in spread)
        if total > _FRONTENDS_MAX:
            last = max(at for at, each in enumerate(spread) if each[name])
            raise FleetError(
                f"models[{last}].frontends: {total} front ends would be on host {name}, "
                f"which has ports for {_FRONTENDS_MAX}"
            )
    return spread


def edges(fleet: Fleet) -> list[str]:
    """Return the hosts of an edge; none if users reach the front ends themselves."""
    return (fleet.edges or control_hosts(fleet)[:1]) if fleet.http else []


def control_hosts(fleet: Fleet) -> list[str]:
    """Return the hosts of the control services."""
    return fleet.control or [next(iter(fleet.hosts))]


def members(fleet: Fleet) -> dict[str, Member]:
    """Return the members of etcd that hosts run, by host; none if the file names etcd's addresses."""
    return {
        name: Member(f"etcd-{name}", _at(host, CLIENT_PORT), _at(host, PEER_PORT))
        for name, host in fleet.hosts.items()
        if name in fleet.etcd
    }


def endpoints(fleet: Fleet) -> list[str]:
    """Return etcd's addresses for clients."""
    return [member.client for member in members(fleet).values()] or fleet.etcd


def admin(fleet: Fleet) -> str:
    """Return the address of the admin API, HOST:PORT[,..]."""
    return ",".join(_at(fleet.hosts[name], PORTS["scheduler"]) for name in control_hosts(fleet))


def own_admins(fleet: Fleet, options: ClusterOptions) -> dict[str, str]:
    """Return the addresses of the admin APIs of models' own clusters, by the names of these."""
    hosts = [fleet.hosts[name] for name in control_hosts(fleet)]
    return {
        cluster: ",".join(_at(host, _port("scheduler", number)) for host in hosts)
        for number, cluster in enumerate(own_clusters(options), start=1)
    }


def host_plan(fleet: Fleet, options: ClusterOptions, name: str, installed: Installation) -> Plan:
    """Plan what a host runs. `options`: those that follow from the file for all hosts."""
    host = fleet.hosts[name]
    models = _models_here(fleet, options, name)
    users = fleet.http or fleet.model.http
    if name in edges(fleet) or (not fleet.http and models[0].frontends):
        _check_http(fleet, name, users)
    service_in = _service_of(fleet, host, name, installed)
    first = fleet.hosts[control_hosts(fleet)[0]]
    # What plans a service of each cluster, with what the names of its control services begin with.
    services = {fleet.cluster: (partial(service_in, fleet.cluster, {}), "")}
    for number, (cluster, prefix) in enumerate(own_clusters(options).items(), start=1):
        spans = spans_to(options, _at(first, _port("monitor", number)))
        services[cluster] = partial(service_in, cluster, spans), prefix
    parts = [*_etcd(fleet, name, installed)]
    for service, prefix in services.values() if name in control_hosts(fleet) else ():
        journal = f"{installed.data}/{prefix}migrations.jsonl"
        parts += [
            service("monitor", f"{prefix}monitor-{name}", Tier.CONTROL),
            service("migration", f"{prefix}migration-{name}", Tier.CONTROL, "--journal", journal),
            service("scheduler", f"{prefix}scheduler-{name}", Tier.CONTROL),
        ]

    def service_of(model: ClusterOptions) -> Callable[..., PartSpec]:
        return services[model.own.name if model.own else fleet.cluster][0]

    parts += [
        worker_part(model, service_of(model), f"{model.prefix}worker-{name}", range(number, number + 1))
        for model in models
        for number in range(model.workers)
    ]
    keys = ("--api-keys", installed.keys) if installed.keys else ()
    behind = count(HTTP_PORT)
    for model in models:
        for number in range(model.frontends):
            # Each has its own: of those that share a port, one that hangs would get its share.
            http = format_address(listen_address(host.address), next(behind)) if fleet.http else users
            member = f"{model.prefix}frontend-{name}-{number}"
            own = replace(model, frontend_arguments=(*model.frontend_arguments, *keys))
            if fleet.http and fleet.tls:
                folder = certificate_folder(installed.certificates, Role.FRONTEND.value, member)
                own = replace(own, line=for_edges(own, folder))
            parts.append(frontend_part(own, service_of(model), member, http))
    if name in edges(fleet):
        edge = service_in(fleet.cluster, {}, "edge", f"edge-{name}", Tier.EDGE, "--http", users, *keys)
        parts.append(replace(edge, http=f"http://{_reached(host, users)}"))
    return Plan(
        parts=parts,
        environment=environment_of(options, _at(first, PORTS["monitor"])),
        admin=admin(fleet),
        http=f"{'http' if fleet.http else options.scheme}://{_users_address(fleet)}",
        etcd=",".join(endpoints(fleet)),
        certificates=installed.certificates if fleet.tls else "",
        cluster=fleet.cluster,
        own=own_admins(fleet, options),
    )


def _models_here(fleet: Fleet, options: ClusterOptions, name: str) -> list[ClusterOptions]:
    """Return each model's options on a host: how many workers and front ends it has there, and which GPUs."""
    gpus = [str(number) for number in range(fleet.hosts[name].gpus)]
    spread = zip(options.models, replicas(fleet, options), frontends(fleet), strict=True)
    models = [
        replace(model, workers=workers[name], frontends=front_ends[name], others=(), earlier_workers=0)
        for model, workers, front_ends in spread
    ]
    # Devices, or on CPUs threads, that all engines of the host share.
    engines = {at: model.workers * model.ranks for at, model in enumerate(models) if _computes(model)}
    total, taken = sum(engines.values()), 0
    for at, ranks in engines.items():
        if len(engines) > 1:
            own = gpus[taken : taken + ranks]
            cores = max(1, options.cores * ranks // total) if options.cores else 0
        else:
            own, cores = gpus, options.cores
        models[at] = replace(models[at], gpus=tuple(own), cores=cores, all_workers=models[at].workers)
        taken += ranks
    return models


def _computes(model: ClusterOptions) -> bool:
    return model.engine is Engine.VLLM and bool(model.workers)


def for_edges(options: ClusterOptions, folder: str) -> VllmLine:
    """Return a front end's line with HTTPS by its own certificate, for whoever has one of this cluster.

    `folder`: of the certificate.
    """
    own = ["--ssl-certfile", f"{folder}/{CERTIFICATE}", "--ssl-keyfile", f"{folder}/{KEY}"]
    others = ["--ssl-ca-certs", f"{folder}/{AUTHORITIES}", "--ssl-cert-reqs", "2"]
    # vllm-rs refuses it, and reads the files at startup only.
    renewal = ["--enable-ssl-refresh"] if options.front is not Front.RUST else []
    return options.line.adding(*own, *others, *renewal)


def _check_http(fleet: Fleet, name: str, http: str) -> None:
    """Raise FleetError if the front ends or the edge of a host cannot listen where users are to reach
    them."""
    listen, port = parse_address(http)
    host = fleet.hosts[name]
    field, what = ("http", "an edge") if fleet.http else ("models[0].http", "front ends")
    known = listen in (host.address, "0.0.0.0", "::") or not exposed([http])
    if not known and is_ip(listen) and is_ip(host.address):
        raise FleetError(f"{field}: {listen} is no address of host {name}, which has {what}; 0.0.0.0 is any")
    behind = range(HTTP_PORT, HTTP_PORT + _FRONTENDS_MAX) if fleet.http else ()
    require_free(field, port, _OWN, (*behind, CLIENT_PORT, PEER_PORT))


def require_free(field: str, port: int, services: Container[int], others: Container[int] = ()) -> None:
    """Raise FleetError if a port for users is one of the services, of their metrics, or of the others."""
    if port in others or any(port - above in services for above in (0, METRICS_ABOVE)):
        raise FleetError(f"{field}: port {port} is one of Tailrace's own ports: choose another")


def _service_of(fleet: Fleet, host: Host, name: str, installed: Installation) -> Callable[..., PartSpec]:
    """Return what plans one service of the host, on the next of its ports.

    It takes the cluster, and the environment of all services of that.
    """
    counts: dict[str, int] = {}
    # A name is resolved by others; the host itself listens on all its addresses.
    listen = listen_address(host.address)
    is_name = listen != host.address

    def service_in(
        cluster: str, common: Mapping[str, str], kind: str, member: str, tier: Tier, *arguments: str
    ) -> PartSpec:
        number = counts.get(kind, 0)
        counts[kind] = number + 1
        port = _port(kind, number)
        command = [*installed.tailrace, "serve", kind, "--etcd", ",".join(endpoints(fleet))]
        command += ["--cluster", cluster, "--listen", format_address(listen, port)]
        command += ["--metrics", format_address(listen, port + METRICS_ABOVE), "--id", member]
        command += ["--advertise", host.address] if is_name else []
        environment = {**common}
        if fleet.tls:
            folder = certificate_folder(installed.certificates, kind, member)
            command += ["--tls", folder]
            environment |= span_certificates(folder)
        command += ["--insecure"] if fleet.insecure_for(kind) else []
        if kind == "worker":
            first = KV_PORT + _KV_EACH * number
            command += [
                "--stream-port",
                str(STREAM_PORT + number),
                "--kv-ports",
                f"{first}-{first + _KV_EACH - 1}",
            ]
        return PartSpec(
            name=member,
            tier=tier,
            command=[*command, *arguments],
            address=_at(host, port),
            environment=environment,
            role=kind if fleet.tls else "",
        )

    return service_in


def _etcd(fleet: Fleet, name: str, installed: Installation) -> Iterator[PartSpec]:
    """Yield the host's member of etcd, if it has one."""
    known = members(fleet)
    if name in known:
        own = known[name]
        folder = certificate_folder(installed.certificates, Role.ETCD.value, own.name) if fleet.tls else None
        data = Path(installed.data) / "etcd"
        command = member_command(
            installed.etcd, data, own, [*known.values()], None if folder is None else Path(folder)
        )
        role = Role.ETCD.value if fleet.tls else ""
        # Where there are several, it waits for the others.
        yield PartSpec(own.name, Tier.ETCD, command, own.client, role=role, timeout_s=_ETCD_TIMEOUT_S)


@dataclass(frozen=True, slots=True)
class Ports:
    """The TCP ports of a host, as nftables writes them."""

    # For the other hosts and operators.
    own: list[str]
    # Of front ends, for the hosts with edges.
    behind: list[str]
    users: list[str]


def ports(fleet: Fleet, plan: Plan, name: str) -> Ports:
    """Return the ports of a host."""
    own: list[str] = []
    behind: list[str] = []
    users: dict[str, None] = {}
    for part in plan.parts:
        port = parse_address(part.address)[1]
        if part.tier is Tier.ETCD:
            own += [str(port), str(PEER_PORT)]
        else:
            own += [str(port), str(port + METRICS_ABOVE)]
        if part.tier is Tier.WORKER:
            own += [part.option("--stream-port"), part.option("--kv-ports")]
        http = part.option("--http")
        if fleet.http and part.tier is Tier.FRONTEND:
            behind.append(str(parse_address(http)[1]))
        elif http:
            users[str(parse_address(http)[1])] = None
    return Ports(own, behind, [*users])


def _port(kind: str, number: int) -> int:
    if kind == "worker":
        return PORTS[kind] + number
    if kind == "edge":
        return EDGE_PORT
    if kind in _CONTROL and number:
        return _FURTHER_CONTROL + MODELS_MAX * _CONTROL.index(kind) + number - 1
    if kind == "frontend" and number:
        return _FURTHER_FRONTENDS + number
    return PORTS[kind]


def _users_address(fleet: Fleet) -> str:
    """Return HOST:PORT at which users reach the first edge or front end."""
    if fleet.http:
        return _reached(fleet.hosts[edges(fleet)[0]], fleet.http)
    first = next((name for name, count in frontends(fleet)[0].items() if count), control_hosts(fleet)[0])
    return _reached(fleet.hosts[first], fleet.model.http)


def _reached(host: Host, http: str) -> str:
    """Return HOST:PORT at which users reach what listens there."""
    listen, port = parse_address(http)
    return _at(host, port) if listen in ("0.0.0.0", "::") else http


def _at(host: Host, port: int) -> str:
    return format_address(host.address, port)
