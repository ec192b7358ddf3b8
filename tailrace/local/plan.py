"""Plan the processes of a local cluster: their order, arguments and environment. Pure."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

from tailrace.address import format_address
from tailrace.local.certificates import OPERATOR, certificate_folder, span_certificates
from tailrace.local.options import (
    DEFAULT_CLUSTER,
    MONITOR_TRACES,
    Bounds,
    ClusterOptions,
    Engine,
    Front,
)
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
    # It starts and stops workers of a complete cluster.
    SCALER = "scaler"


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
    # Whether it is a worker whose number follows the load.
    scaled: bool = False

    @property
    def kind(self) -> str:
        """Return which service it is: etcd, or as `tailrace serve` names it."""
        return "etcd" if self.tier is Tier.ETCD else self.command[[*self.command].index("serve") + 1]

    def option(self, flag: str) -> str:
        """Return the value of a flag of its command, given as one word or two; empty if it has none."""
        for at, word in enumerate(self.command):
            if word == flag:
                return self.command[at + 1]
            if word.startswith(f"{flag}="):
                return word.partition("=")[2]
        return ""


@dataclass(frozen=True, slots=True)
class ScaledModel:
    """A model whose number of instances follows `tailrace_desired_instances`, within bounds."""

    # The metric's label, which no other model of the fleet has (tailrace/fleet/file.py).
    model: str
    least: int
    most: int
    # For how long the metric must be lower before a worker is stopped, besides the schedulers' cool-down.
    hold_s: float
    # Names of the schedulers that export the metric.
    schedulers: Sequence[str]
    # As many as it may have, in the order in which they start.
    workers: Sequence[PartSpec]
    # Values of CUDA_VISIBLE_DEVICES, of which each gets one; empty: there are no GPUs.
    devices: Sequence[str] = ()

    @property
    def names(self) -> frozenset[str]:
        """Return the names of its workers."""
        return frozenset(spec.name for spec in self.workers)


@dataclass(frozen=True, slots=True)
class Plan:
    """A complete cluster, with those of single models. `environment` applies to every part."""

    parts: Sequence[PartSpec]
    environment: Mapping[str, str]
    admin: str
    http: str
    etcd: str
    # Folder of the certificates; empty: no TLS.
    certificates: str = ""
    # Its name in etcd.
    cluster: str = DEFAULT_CLUSTER
    # The addresses of the admin APIs of models' own clusters, by the names of these.
    own: Mapping[str, str] = field(default_factory=dict)
    # Of their workers, `parts` has those of the start.
    scaled: Sequence[ScaledModel] = ()

    def tier(self, tier: Tier) -> list[PartSpec]:
        """Return the parts of one tier, in order."""
        return [part for part in self.parts if part.tier is tier]


def waits_for_worker(spec: PartSpec, scaled: Sequence[ScaledModel], running: Collection[str]) -> bool:
    """Return whether a part is ready only once the scaler has started a worker: a front end of a model that
    has none. `running`: names of parts."""
    model = spec.option("--model")
    return spec.tier is Tier.FRONTEND and any(
        each.model == model and each.names.isdisjoint(running) for each in scaled
    )


_GPU_MEMORY = 0.9
"""Share of a GPU's memory that its workers may use together."""

_PROCESSES_MAX = 8
"""Up to this many simulated workers get their own process; more share processes."""

_WORKERS_PER_PROCESS = 25

_VLLM_TIMEOUT_S = 600.0
"""Timeout for a worker or API server to load vLLM and a model; its exit is detected at once."""

_PROFILE_TIMEOUT_S = 150.0
"""Additional timeout for a simulated worker to be profiled, or to wait for another one's profiling."""


ON_DEMAND: Final = "--on-demand"
"""Of a front end whose API server starts with its first connection."""
SPANS: Final = "OTEL_EXPORTER_OTLP_ENDPOINT"
# Of a scheduler (tailrace/scaling.py).
_WINDOW_S = 60.0

DEVICES = "CUDA_VISIBLE_DEVICES"

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
    frontends = sum(model.frontends + (model.front is Front.BOTH) for model in options.models)
    # Each with what the names of its control services begin with.
    clusters = {options.cluster: "", **own_clusters(options)}
    services = len(clusters) * (2 + options.schedulers) + len(groups) + frontends + bool(options.edge)
    # Behind an edge, the HTTP ports of front ends, too.
    behind = frontends if options.edge else 0
    etcd_port, *ports = free_ports(1 + 2 * services + behind + options.console)
    etcd = f"{LOOPBACK}:{etcd_port}"
    certificates = f"{data}/certs" if options.tls else ""
    addresses = iter([f"{LOOPBACK}:{port}" for port in ports])

    monitors: dict[str, str] = {}

    def service_in(cluster: str, kind: str, name: str, tier: Tier, *arguments: str) -> PartSpec:
        listen, metrics = next(addresses), next(addresses)
        command = [*tailrace, "serve", kind, "--etcd", etcd, "--listen", listen, "--metrics", metrics]
        if cluster != DEFAULT_CLUSTER:
            command += ["--cluster", cluster]
        # The first part of a cluster is its monitor.
        monitor = monitors.setdefault(cluster, listen)
        environment = {} if cluster == options.cluster else spans_to(options, monitor)
        if certificates:
            folder = certificate_folder(certificates, kind, name)
            command += ["--tls", folder]
            environment |= span_certificates(folder)
        command += ["--id", name, *arguments]
        return PartSpec(name, tier, command, listen, environment, role=kind if certificates else "")

    role = Role.ETCD.value if certificates else ""
    parts = [PartSpec("etcd", Tier.ETCD, etcd_command(etcd_port), etcd, role=role)]
    in_cluster: dict[str, list[ClusterOptions]] = {cluster: [] for cluster in clusters}
    services_of: dict[str, Callable[..., PartSpec]] = {}
    for model in options.models:
        cluster = model.own.name if model.own else options.cluster
        in_cluster[cluster].append(model)
        services_of[model.prefix] = partial(service_in, cluster)
    admins: dict[str, str] = {}
    schedulers_of: dict[str, list[str]] = {}
    for cluster, prefix in clusters.items():
        service = partial(service_in, cluster)
        parts.append(service("monitor", f"{prefix}monitor", Tier.CONTROL))
        journal = f"{data}/{prefix}migrations.jsonl"
        parts.append(service("migration", f"{prefix}migration", Tier.CONTROL, "--journal", journal))
        following = scheduler_arguments([each.bounds for each in in_cluster[cluster] if each.bounds])
        schedulers = [
            service(
                "scheduler", _numbered(f"{prefix}scheduler", n, options.schedulers), Tier.CONTROL, *following
            )
            for n in range(options.schedulers)
        ]
        parts += schedulers
        schedulers_of[cluster] = [part.name for part in schedulers]
        admins[cluster] = ",".join(part.address for part in schedulers)
    workers: dict[str, list[PartSpec]] = {model.prefix: [] for model in options.models}
    for model, group in groups:
        part = worker_part(model, services_of[model.prefix], f"{model.prefix}worker", group)
        workers[model.prefix].append(replace(part, scaled=model.bounds is not None))
    for model in options.models:
        own = workers[model.prefix]
        parts += own if model.bounds is None else own[: model.workers]
    scaled = [
        each
        for cluster, models in in_cluster.items()
        for each in _scaled_models(models, workers, schedulers_of[cluster])
    ]
    http = options.edge or format_address(options.host, options.port)
    for model in options.models:
        of_model = services_of[model.prefix]
        first = replace(model, front=Front.RUST) if model.front is Front.BOTH else model
        for number in range(model.frontends):
            # An edge sees of each whether it answers.
            listen = next(addresses) if options.edge else http
            name = _numbered(f"{model.prefix}frontend", number, model.frontends)
            parts.append(frontend_part(first, of_model, name, listen))
        if model.front is Front.BOTH:
            name = f"{model.prefix}frontend-python"
            parts.append(frontend_part(model, of_model, name, next(addresses), ON_DEMAND))
    if options.edge:
        edge = service_in(options.cluster, "edge", "edge", Tier.EDGE, "--http", http, *options.edge_arguments)
        parts.append(replace(edge, http=f"http://{http}"))
    admin = admins.pop(options.cluster)
    if options.console:
        parts.append(_console_part(next(addresses), tailrace, admin, certificates, data))
    if scaled:
        command = [*tailrace, "serve", "scaler", "--run-dir", str(Path(data).parent)]
        parts.append(PartSpec("scaler", Tier.SCALER, command, ""))
    return Plan(
        parts=parts,
        environment=environment_of(options, monitors[options.cluster]),
        admin=admin,
        http=f"{'http' if options.edge else options.scheme}://{http}",
        etcd=etcd,
        certificates=certificates,
        cluster=options.cluster,
        own=admins,
        scaled=scaled,
    )


def own_clusters(options: ClusterOptions) -> dict[str, str]:
    """Return the clusters of single models, each with what the names of its control services begin with."""
    return {model.own.name: model.prefix for model in options.models if model.own}


def _scaled_models(
    models: Sequence[ClusterOptions], workers: Mapping[str, Sequence[PartSpec]], schedulers: Sequence[str]
) -> list[ScaledModel]:
    """Return those models of a cluster whose number of instances follows the load.

    `workers`: by the prefix of the model; `schedulers`: names of the cluster's.
    """
    bounds = [model.bounds for model in models if model.bounds is not None]
    return [
        ScaledModel(
            model=model.model,
            least=model.bounds.least,
            most=model.bounds.most,
            hold_s=model.bounds.cooldown_s - min(each.cooldown_s for each in bounds),
            schedulers=schedulers,
            workers=workers[model.prefix],
            devices=_places(model) if model.engine is Engine.VLLM else (),
        )
        for model in models
        if model.bounds is not None
    ]


def scheduler_arguments(bounds: Sequence[Bounds]) -> list[str]:
    """Return the options of schedulers whose desired numbers of instances are followed within these bounds.

    What differs by model is up to who follows them.
    """
    if not bounds:
        return []
    least, cooldown_s = min(each.least for each in bounds), min(each.cooldown_s for each in bounds)
    arguments = ["--desired-min", str(least), "--desired-cooldown", f"{cooldown_s:g}"]
    return [*arguments, "--desired-window", f"{cooldown_s:g}"] if cooldown_s < _WINDOW_S else arguments


def _places(options: ClusterOptions) -> list[str]:
    """Return the adjacent GPUs of each worker that has GPUs of its own."""
    ranks = options.ranks
    return [",".join(options.gpus[at : at + ranks]) for at in range(0, len(options.gpus) + 1 - ranks, ranks)]


def _groups(options: ClusterOptions) -> list[range]:
    """Return the numbers of the workers that share each process; a vLLM engine, and a worker that is started
    and stopped by itself, needs its own process."""
    if options.bounds is not None:
        return [range(number, number + 1) for number in range(options.bounds.most)]
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
        environment[DEVICES] = ",".join(options.gpus[first : first + options.ranks])
        share = _GPU_MEMORY / math.ceil(options.sharing / places)
        arguments += ["--gpu-memory-utilization", f"{share:.3f}"]  # the line's own takes precedence
    part = service("worker", members[0], Tier.WORKER, *arguments, *given)
    environment = {**part.environment, **environment}
    return replace(part, members=members, environment=environment, heavy=True, timeout_s=_VLLM_TIMEOUT_S)


def frontend_part(
    options: ClusterOptions, service: Callable[..., PartSpec], name: str, http: str, *more: str
) -> PartSpec:
    """Plan a front end, with vllm-rs if `front` says so, else with the Python app; `service` as for workers,
    `more`: options of it alone."""
    front = Front.RUST if options.front is Front.RUST else Front.PYTHON
    arguments = ["--http", http, "--front", front.value, "--model", options.model, *more]
    if "served_model_name" not in options.line.flags:
        arguments += ["--served-model-name", options.served_name]
    arguments += [*options.frontend_arguments, *options.line.arguments]
    part = service("frontend", name, Tier.FRONTEND, *arguments)
    return replace(
        part,
        http=f"{options.scheme}://{http}",
        heavy=front is Front.PYTHON and ON_DEMAND not in more,
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
    if options.traces is not None and options.traces != MONITOR_TRACES:
        environment[SPANS] = options.traces
    return {**environment, **spans_to(options, monitor), **options.environment}


def spans_to(options: ClusterOptions, monitor: str) -> dict[str, str]:
    """Return the environment that sends spans to the monitor at this address; empty if they go elsewhere."""
    if options.traces != MONITOR_TRACES or SPANS in options.environment:
        return {}
    return {SPANS: f"{'https' if options.tls else 'http'}://{monitor}"}
