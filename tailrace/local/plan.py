"""Plan the processes of a local cluster: their order, arguments and environment. Pure."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tailrace.local.certificates import OPERATOR, certificate_folder, span_certificates
from tailrace.local.options import DEFAULT_CLUSTER, MONITOR_TRACES, ClusterOptions, Engine, Front
from tailrace.local.ports import LOOPBACK
from tailrace.security.roles import Role


class Tier(enum.StrEnum):
    """A group of parts that start together; tiers start in this order and stop in reverse."""

    ETCD = "etcd"
    CONTROL = "control"
    WORKER = "worker"
    FRONTEND = "frontend"
    EDGE = "edge"
    # Nobody waits for it: it starts when everything else is ready.
    CONSOLE = "console"


@dataclass(frozen=True, slots=True)
class PartSpec:
    """One process: its command, its additional environment, and its health address."""

    name: str
    tier: Tier
    command: Sequence[str]
    # HOST:PORT of gRPC health (of etcd and the console: HTTP health).
    address: str
    # Environment of this part only.
    environment: Mapping[str, str] = field(default_factory=dict)
    # Instances in it, for workers only.
    members: Sequence[str] = ()
    # HTTP address, for front ends and edges only.
    http: str = ""
    # Role of its certificate; empty: it has none.
    role: str = ""
    # Whether it needs seconds of CPU to start, so that not all of them start at once.
    heavy: bool = False
    timeout_s: float = 60.0

    def option(self, flag: str) -> str:
        """Return the value of a flag of its command; empty if it has none."""
        command = list(self.command)
        return command[command.index(flag) + 1] if flag in command else ""


@dataclass(frozen=True, slots=True)
class Plan:
    """A complete cluster. `environment` applies to every part."""

    parts: Sequence[PartSpec]
    environment: Mapping[str, str]
    admin: str
    http: str
    etcd: str
    # Folder of the certificates; empty: no TLS.
    certificates: str = ""
    # Its name in etcd.
    cluster: str = DEFAULT_CLUSTER

    def tier(self, tier: Tier) -> list[PartSpec]:
        """Return the parts of one tier, in order."""
        return [part for part in self.parts if part.tier is tier]


_GPU_MEMORY = 0.9
"""Share of a GPU's memory that its workers may use together."""

_PROCESSES_MAX = 8
"""Up to this many simulated workers get their own process; more share processes."""

_WORKERS_PER_PROCESS = 25

_VLLM_TIMEOUT_S = 600.0
"""Timeout for a worker or API server to load vLLM and a model; its exit is detected at once."""

_PROFILE_TIMEOUT_S = 150.0
"""Additional timeout for a simulated worker to be profiled, or to wait for another one's profiling."""


# numba, with which vLLM looks for n-grams, would raise the engine's number of threads.
THREADS = ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS")


def make_plan(
    options: ClusterOptions,
    free_ports: Callable[[int], Sequence[int]],
    etcd_command: Callable[[int], Sequence[str]],
    tailrace: Sequence[str],
    data: str,
) -> Plan:
    """Plan a cluster.

    `free_ports(n)`: returns n free ports; `etcd_command(port)`: returns the command of an etcd; `tailrace`:
    the command that runs `tailrace`; `data`: folder for the parts' data.
    """
    groups = [(model, group) for model in options.models for group in _groups(model)]
    frontends = sum(model.frontends for model in options.models)
    services = 2 + options.schedulers + len(groups) + frontends + bool(options.edge)
    behind = frontends if options.edge else 0
    etcd_port, *ports = free_ports(1 + 2 * services + behind + options.console)
    etcd = f"{LOOPBACK}:{etcd_port}"
    certificates = f"{data}/certs" if options.tls else ""
    addresses = iter([f"{LOOPBACK}:{port}" for port in ports])

    def service(kind: str, name: str, tier: Tier, *arguments: str) -> PartSpec:
        listen, metrics = next(addresses), next(addresses)
        command = [*tailrace, "serve", kind, "--etcd", etcd, "--listen", listen, "--metrics", metrics]
        if options.cluster != DEFAULT_CLUSTER:
            command += ["--cluster", options.cluster]
        if certificates:
            command += ["--tls", certificate_folder(certificates, kind, name)]
        part = PartSpec(name, tier, [*command, "--id", name, *arguments], listen)
        if not certificates:
            return part
        environment = span_certificates(certificate_folder(certificates, kind, name))
        return replace(part, role=kind, environment=environment)

    parts = [PartSpec("etcd", Tier.ETCD, etcd_command(etcd_port), etcd)]
    if certificates:
        parts = [replace(parts[0], role=Role.ETCD.value)]
    monitor = service("monitor", "monitor", Tier.CONTROL)
    parts.append(monitor)
    journal = f"{data}/migrations.jsonl"
    parts.append(service("migration", "migration", Tier.CONTROL, "--journal", journal))
    schedulers = [
        service("scheduler", _numbered("scheduler", number, options.schedulers), Tier.CONTROL)
        for number in range(options.schedulers)
    ]
    parts += schedulers
    parts += [worker_part(model, service, f"{model.prefix}worker", group) for model, group in groups]
    http = options.edge or f"{options.host}:{options.port}"
    for model in options.models:
        for number in range(model.frontends):
            # An edge sees of each whether it answers.
            listen = next(addresses) if options.edge else http
            name = _numbered(f"{model.prefix}frontend", number, model.frontends)
            parts.append(frontend_part(model, service, name, listen))
    if options.edge:
        edge = service("edge", "edge", Tier.EDGE, "--http", http, *options.edge_arguments)
        parts.append(replace(edge, http=f"http://{http}"))
    admin = ",".join(part.address for part in schedulers)
    if options.console:
        parts.append(_console_part(next(addresses), tailrace, admin, certificates, data))
    return Plan(
        parts=parts,
        environment=environment_of(options, monitor.address),
        admin=admin,
        http=f"{'http' if options.edge else options.scheme}://{http}",
        etcd=etcd,
        certificates=certificates,
        cluster=options.cluster,
    )


def _groups(options: ClusterOptions) -> list[range]:
    """Return the numbers of the workers that share each process; a vLLM engine needs its own process."""
    separate = options.engine is Engine.VLLM or options.workers <= _PROCESSES_MAX
    size = 1 if separate else _WORKERS_PER_PROCESS
    return [range(first, min(first + size, options.workers)) for first in range(0, options.workers, size)]


def worker_part(
    options: ClusterOptions, service: Callable[..., PartSpec], prefix: str, group: range
) -> PartSpec:
    """Plan the process of the workers with these numbers. `service(kind, name, tier, *arguments)` plans one
    of the services."""
    arguments = ["--engine", options.engine.value, "--model", options.model, "--intra", "policy"]
    given = [*options.worker_arguments, *options.line.arguments]
    number = group[0]
    members = [f"{prefix}-{n}" for n in group]
    if options.engine is Engine.SIMULATED:
        arguments += ["--count", str(len(group))] if len(group) > 1 else []
        part = service("worker", members[0], Tier.WORKER, *arguments, *given)
        profiles = "--profile-at-start" in options.worker_arguments
        timeout_s = part.timeout_s + (_PROFILE_TIMEOUT_S if profiles else 0.0)
        return replace(part, members=members, timeout_s=timeout_s)
    # Engines with one thread per core each would slow each other down; leave a core for the API server.
    threads = max(1, (options.cores - 1) // (options.sharing * options.ranks))
    environment = dict.fromkeys(THREADS, str(threads)) if options.cores else {}
    if options.gpus:
        # Adjacent GPUs for each worker. A worker that needs more than there are fails with a message.
        places = max(1, len(options.gpus) // options.ranks)
        first = (options.earlier_workers + number) % places * options.ranks
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(options.gpus[first : first + options.ranks])
        share = _GPU_MEMORY / math.ceil(options.sharing / places)
        arguments += ["--gpu-memory-utilization", f"{share:.3f}"]  # the line's own takes precedence
    part = service("worker", members[0], Tier.WORKER, *arguments, *given)
    environment = {**part.environment, **environment}
    return replace(part, members=members, environment=environment, heavy=True, timeout_s=_VLLM_TIMEOUT_S)


def frontend_part(
    options: ClusterOptions, service: Callable[..., PartSpec], name: str, http: str
) -> PartSpec:
    """Plan a front end; `service` as for workers."""
    arguments = ["--http", http, "--front", options.front.value, "--model", options.model]
    if "served_model_name" not in options.line.flags:
        arguments += ["--served-model-name", options.served_name]
    arguments += [*options.frontend_arguments, *options.line.arguments]
    part = service("frontend", name, Tier.FRONTEND, *arguments)
    return replace(
        part,
        http=f"{options.scheme}://{http}",
        heavy=options.front is Front.PYTHON,
        timeout_s=_VLLM_TIMEOUT_S,
    )


def _console_part(
    address: str, tailrace: Sequence[str], admin: str, certificates: str, data: str
) -> PartSpec:
    """Plan the console, which acts with the operator's certificate."""
    command = [*tailrace, "serve", "console", "--http", address, "--admin", admin]
    if certificates:
        command += ["--tls", certificate_folder(certificates, OPERATOR.role.value, OPERATOR.name)]
        command += ["--token-file", f"{data}/console.token"]
    return PartSpec("console", Tier.CONSOLE, command, address)


def _numbered(name: str, number: int, count: int) -> str:
    return name if count == 1 else f"{name}-{number}"


def environment_of(options: ClusterOptions, monitor: str) -> dict[str, str]:
    """Return the environment of every part. `monitor`: its address."""
    # Disable vLLM's usage reporting: a local cluster makes no outgoing connections.
    environment = {"VLLM_NO_USAGE_STATS": "1"}
    if options.traces is not None:
        scheme = "https" if options.tls else "http"
        endpoint = f"{scheme}://{monitor}" if options.traces == MONITOR_TRACES else options.traces
        environment["OTEL_EXPORTER_OTLP_ENDPOINT"] = endpoint
    return {**environment, **options.environment}
