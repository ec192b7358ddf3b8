"""What each host of a fleet runs: the same parts as those of a local cluster, on fixed ports. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from tailrace.address import format_address, is_ip, listen_address, parse_address
from tailrace.fleet.file import WORKERS_MAX, Fleet, FleetError, Host
from tailrace.local.certificates import certificate_folder, span_certificates
from tailrace.local.options import ClusterOptions
from tailrace.local.plan import PartSpec, Plan, Tier, environment_of, frontend_part, worker_part
from tailrace.security.options import exposed
from tailrace.security.roles import Role
from tailrace.service.etcd import CLIENT_PORT, PEER_PORT, Member, member_command

METRICS_ABOVE: Final = 2000
"""A service's metrics are on its own port plus this."""
PORTS: Final = {"scheduler": 7101, "monitor": 7102, "migration": 7103, "frontend": 7104, "worker": 7105}
"""gRPC ports of the services, of the first one of a kind on a host."""
_FURTHER_FRONTENDS: Final = 7190
STREAM_PORT: Final = 7205
"""Of the message streams of a host's first worker."""
KV_PORT: Final = 7300
"""The first of a host's ports for KV."""
# One for each network device.
_KV_EACH: Final = 8
# Of all services; their metrics are above.
_OWN: Final = range(7101, KV_PORT + _KV_EACH * WORKERS_MAX)
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


def replicas(fleet: Fleet, options: ClusterOptions) -> dict[str, int]:
    """Return the number of the model's instances on each host.

    Raise FleetError if GPUs are too few, or the ports of a host for its instances.
    """
    spread = _spread(fleet, options)
    for name, count in spread.items():
        if count > WORKERS_MAX:
            raise FleetError(
                f"models[0].replicas: {count} of them would be on host {name}, "
                f"which has ports for {WORKERS_MAX}"
            )
    return spread


def _spread(fleet: Fleet, options: ClusterOptions) -> dict[str, int]:
    given = fleet.model.replicas
    if isinstance(given, Mapping):
        return {name: given.get(name, 0) for name in fleet.hosts}
    places = {name: host.gpus // options.ranks for name, host in fleet.hosts.items()}
    if not any(places.values()):
        if any(host.gpus for host in fleet.hosts.values()):
            raise FleetError(f"hosts: an instance takes {options.ranks} GPUs, and no host has as many")
        places = dict.fromkeys(fleet.hosts, 1)
    if given is None:
        return places
    shares = dict.fromkeys(places, 0)
    free = [name for name, count in places.items() if count]
    for _ in range(given):
        # To the host whose places are used least.
        shares[min(free, key=lambda name: shares[name] / places[name])] += 1
    return shares


def frontends(fleet: Fleet) -> dict[str, int]:
    """Return the number of front ends on each host."""
    given = fleet.model.frontends
    if isinstance(given, Mapping):
        return {name: given.get(name, 0) for name in fleet.hosts}
    return {name: given if name == control_hosts(fleet)[0] else 0 for name in fleet.hosts}


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


def host_plan(fleet: Fleet, options: ClusterOptions, name: str, installed: Installation) -> Plan:
    """Plan what a host runs. `options`: those that follow from the file for all hosts."""
    host = fleet.hosts[name]
    here = replace(
        options,
        workers=replicas(fleet, options)[name],
        frontends=frontends(fleet)[name],
        gpus=tuple(str(number) for number in range(host.gpus)),
    )
    if here.frontends:
        _check_http(fleet, name)
    service = _service_of(fleet, host, name, installed)
    parts = [*_etcd(fleet, name, installed)]
    journal = f"{installed.data}/migrations.jsonl"
    if name in control_hosts(fleet):
        parts += [
            service("monitor", f"monitor-{name}", Tier.CONTROL),
            service("migration", f"migration-{name}", Tier.CONTROL, "--journal", journal),
            service("scheduler", f"scheduler-{name}", Tier.CONTROL),
        ]
    parts += [
        worker_part(here, service, f"worker-{name}", range(number, number + 1))
        for number in range(here.workers)
    ]
    keys = ["--api-keys", installed.keys] if installed.keys else []
    with_keys = replace(here, frontend_arguments=(*here.frontend_arguments, *keys))
    parts += [
        frontend_part(with_keys, service, f"frontend-{name}-{number}", fleet.model.http)
        for number in range(here.frontends)
    ]
    monitor = _at(fleet.hosts[control_hosts(fleet)[0]], PORTS["monitor"])
    return Plan(
        parts=parts,
        environment=environment_of(options, monitor),
        admin=admin(fleet),
        http=f"{options.scheme}://{_users_address(fleet)}",
        etcd=",".join(endpoints(fleet)),
        certificates=installed.certificates if fleet.tls else "",
        cluster=fleet.cluster,
    )


def _check_http(fleet: Fleet, name: str) -> None:
    """Raise FleetError if the front ends of a host cannot listen where users are to reach them."""
    listen, port = parse_address(fleet.model.http)
    host = fleet.hosts[name]
    known = listen in (host.address, "0.0.0.0", "::") or not exposed([fleet.model.http])
    if not known and is_ip(listen) and is_ip(host.address):
        raise FleetError(
            f"models[0].http: {listen} is no address of host {name}, which has front ends; 0.0.0.0 is any"
        )
    if port in (CLIENT_PORT, PEER_PORT) or any(port - above in _OWN for above in (0, METRICS_ABOVE)):
        raise FleetError(f"models[0].http: port {port} is one of Tailrace's own ports")


def _service_of(fleet: Fleet, host: Host, name: str, installed: Installation) -> Callable[..., PartSpec]:
    """Return what plans one service of the host, on the next of its ports."""
    counts: dict[str, int] = {}
    # A name is resolved by others; the host itself listens on all its addresses.
    listen = listen_address(host.address)
    is_name = listen != host.address

    def service(kind: str, member: str, tier: Tier, *arguments: str) -> PartSpec:
        number = counts.get(kind, 0)
        counts[kind] = number + 1
        port = _port(kind, number)
        command = [*installed.tailrace, "serve", kind, "--etcd", ",".join(endpoints(fleet))]
        command += ["--cluster", fleet.cluster, "--listen", format_address(listen, port)]
        command += ["--metrics", format_address(listen, port + METRICS_ABOVE), "--id", member]
        command += ["--advertise", host.address] if is_name else []
        environment: dict[str, str] = {}
        if fleet.tls:
            folder = certificate_folder(installed.certificates, kind, member)
            command += ["--tls", folder]
            environment = span_certificates(folder)
        else:
            command.append("--insecure")
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

    return service


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


def ports(fleet: Fleet, plan: Plan, name: str) -> tuple[list[str], list[str]]:
    """Return the TCP ports of a host for the other hosts and operators, and those for users, as nftables
    writes them."""
    own: list[str] = []
    for part in plan.parts:
        port = parse_address(part.address)[1]
        if part.tier is Tier.ETCD:
            own += [str(port), str(PEER_PORT)]
        else:
            own += [str(port), str(port + METRICS_ABOVE)]
        if part.tier is Tier.WORKER:
            own += [part.option("--stream-port"), part.option("--kv-ports")]
    users = [str(parse_address(fleet.model.http)[1])] if plan.tier(Tier.FRONTEND) else []
    return own, users


def _port(kind: str, number: int) -> int:
    if kind == "worker":
        return PORTS[kind] + number
    if kind == "frontend" and number:
        return _FURTHER_FRONTENDS + number
    return PORTS[kind]


def _users_address(fleet: Fleet) -> str:
    """Return HOST:PORT at which users reach the first front end."""
    first = next((name for name, count in frontends(fleet).items() if count), control_hosts(fleet)[0])
    listen, port = parse_address(fleet.model.http)
    wildcard = listen in ("0.0.0.0", "::")
    return _at(fleet.hosts[first], port) if wildcard else fleet.model.http


def _at(host: Host, port: int) -> str:
    return format_address(host.address, port)
