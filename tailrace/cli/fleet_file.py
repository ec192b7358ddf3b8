"""What commands do with a `fleet.yaml`: read it, and plan what it asks for."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import click
from click.core import ParameterSource

from tailrace.address import parse_address
from tailrace.cli.errors import UsageProblem
from tailrace.cli.line import arguments_of, with_line
from tailrace.fleet.file import Fleet, FleetError, Model, read_fleet
from tailrace.fleet.folders import CERTIFICATES
from tailrace.fleet.hosts import Installation, host_plan, members
from tailrace.local.certificates import ETCD_SERVER, certificate_folder
from tailrace.local.options import LOCAL_WORKERS_MAX, MONITOR_TRACES, ClusterOptions, Front, OwnCluster
from tailrace.local.plan import Plan, make_plan
from tailrace.local.ports import free_ports
from tailrace.local.state import RunFolder
from tailrace.service.etcd import etcd_command, find_etcd

F = TypeVar("F", bound=Callable[..., Any])

# Of front ends whose model may have no instance.
_WAIT: Final = ("--instance-wait", "600")
_TRACES: Final = {"monitor": MONITOR_TRACES, "none": None}


def file_option(required: bool) -> Callable[[F], F]:
    """Add `--file`, a fleet.yaml."""
    return click.option(
        "-f",
        "--file",
        type=click.Path(dir_okay=False, path_type=Path),
        required=required,
        metavar="FILE",
        help="A fleet.yaml (docs/fleet-file.md).",
    )


@dataclass(frozen=True, slots=True)
class FleetFile:
    """A file that was read; users' keys and, of a host, its certificates are beside it."""

    path: Path
    fleet: Fleet

    def beside(self, name: str) -> Path:
        """Return the absolute path of a file beside this one."""
        return self.path.absolute().parent / name


def read_fleet_file(path: Path) -> FleetFile:
    """Read and check a file. Raise UsageProblem, which names the field."""
    try:
        return FleetFile(path, read_fleet(path))
    except FleetError as error:
        raise UsageProblem(str(error)) from error


def options_of(file: FleetFile) -> ClusterOptions:
    """Return the options that follow from the file for all hosts, or for this machine. Raise UsageProblem."""
    fleet = file.fleet
    # Of several hosts, tailrace/fleet/hosts.py says what each has.
    keys = ("--api-keys", str(file.beside(fleet.keys))) if fleet.keys and not fleet.hosts else ()
    insecure = ("--insecure",) if fleet.insecure_for("frontend") and not fleet.hosts else ()
    models = [
        replace(each, frontend_arguments=(*each.frontend_arguments, *keys, *insecure), others=())
        for each in common_options(file).models
    ]
    return replace(models[0], others=tuple(models[1:]), edge=fleet.http, edge_arguments=(*keys, *insecure))


def common_options(file: FleetFile) -> ClusterOptions:
    """Return the options that follow from the file wherever its processes run. Raise UsageProblem."""
    fleet = file.fleet
    options = ClusterOptions(
        policy=fleet.policy.name,
        policy_parameters=fleet.policy.texts,
        schedulers=fleet.schedulers,
        tls=fleet.tls,
        traces=_TRACES.get(fleet.traces, fleet.traces),
        cluster=fleet.cluster,
        environment=fleet.environment,
    )
    words = _part_names(fleet)
    models = [
        replace(
            _with_model(file, options, number),
            workers=model.number or 0,
            frontends=model.frontends if isinstance(model.frontends, int) else 1,
            prefix=f"{words[number]}-" if len(words) > 1 or model.has_cluster else "",
            own=_own_cluster(fleet, model, words[number]) if model.has_cluster else None,
        )
        for number, model in enumerate(fleet.models)
    ]
    return replace(models[0], others=tuple(models[1:]))


def _with_model(file: FleetFile, options: ClusterOptions, number: int) -> ClusterOptions:
    """Return the options with one of the file's models. Raise UsageProblem."""
    model = file.fleet.models[number]
    host, port = parse_address(model.http)
    options = replace(
        options,
        engine=model.engine,
        front=Front.PYTHON if model.front is Front.AUTO and file.fleet.hosts else model.front,
        model=model.model,
        host=host,
        port=port,
        bounds=None if model.autoscale is None else model.autoscale.bounds,
    )
    try:
        options = with_line(options, arguments_of(model.flags))
    except (click.UsageError, UsageProblem) as error:
        raise UsageProblem(f"{file.path}: models[{number}].flags: {error.format_message()}") from error
    if options.bounds is None or options.bounds.least:
        return options
    # Before what the file says itself, which counts.
    return replace(options, frontend_arguments=(*_WAIT, *options.frontend_arguments))


def _own_cluster(fleet: Fleet, model: Model, word: str) -> OwnCluster:
    """Return the cluster of a model that states a policy or SLOs: what it does not state is the fleet's."""
    policy = model.policy or fleet.policy
    return OwnCluster(f"{fleet.cluster}.{word}", policy.name, policy.texts, fleet.objectives(model))


def admins_of(options: ClusterOptions, admin: str, own: Mapping[str, str]) -> dict[str, str]:
    """Return the address of the admin API for each name that users send. `admin`: of the fleet's cluster;
    `own`: of those of single models."""
    return {
        name: own.get(model.own.name, "") if model.own else admin
        for model in options.models
        for name in model.served_names
    }


def _part_names(fleet: Fleet) -> list[str]:
    """Return a word for each model that the names of its processes begin with."""
    words: list[str] = []
    for number, model in enumerate(fleet.models):
        name = model.served_name.rstrip("/").rpartition("/")[2].lower()
        word = re.sub(r"[^a-z0-9]+", "-", name).strip("-")[:30].strip("-") or "model"
        while word in words:
            word = f"{word}-{number}"
        words.append(word)
    return words


def require_alone(*names: str) -> None:
    """Raise UsageProblem for an option beside `--file` that is not one of `names`: the file says it."""
    context = click.get_current_context()
    for parameter in context.command.params:
        given = context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE
        if given and parameter.name not in ("file", *names):
            raise UsageProblem(f"{parameter.opts[0]}: with --file, the file says it")
    if arguments := context.params.get("arguments"):
        raise UsageProblem(f"{arguments[0]}: with --file, the file says it")


def host_of(file: FleetFile, on: str | None) -> str:
    """Return the host of the file that this machine is; empty if it describes one machine.

    Raise UsageProblem.
    """
    fleet = file.fleet
    if on is not None and on not in fleet.hosts:
        known = ", ".join(fleet.hosts) or "none"
        raise UsageProblem(f"--on: {on!r} is none of the file's hosts ({known})")
    if on is None and len(fleet.hosts) > 1:
        raise UsageProblem(
            f"the file has several hosts: --on says which one this is ({', '.join(fleet.hosts)})"
        )
    return on or next(iter(fleet.hosts), "")


def plan_here(options: ClusterOptions, folder: RunFolder, file: FleetFile | None, host: str) -> Plan:
    """Plan the parts on this machine. `host`: the one in the file that this machine is; empty: all parts,
    on loopback.

    Raise EtcdNotFoundError, PortUnavailable, UsageProblem.
    """
    tailrace = [sys.executable, "-m", "tailrace"]
    if file is None or not host:
        workers = sum(
            model.workers if model.bounds is None else model.bounds.most for model in options.models
        )
        if workers > LOCAL_WORKERS_MAX:
            raise UsageProblem(
                f"models[0].replicas: {workers} are too many for one machine; it can have {LOCAL_WORKERS_MAX}"
            )
        for number, model in enumerate(options.models):
            if model.bounds is not None and not model.workers and model.frontends > 1:
                # The first one takes the port for all, once it has an instance.
                raise UsageProblem(
                    f"models[{number}].replicas: at least 1 at the start with several front ends"
                )
        command = partial(_etcd_command, folder, options.tls)
        return make_plan(options, free_ports, command, tailrace, str(folder.data))
    fleet = file.fleet
    installed = Installation(
        tailrace=tailrace,
        etcd=str(find_etcd()) if host in members(fleet) else "",
        data=str(folder.kept),
        certificates=str(file.beside(CERTIFICATES)),
        keys=str(file.beside(fleet.keys)) if fleet.keys else "",
    )
    try:
        return host_plan(fleet, options, host, installed)
    except FleetError as error:
        raise UsageProblem(f"{file.path}: {error}") from error


def plans(file: FleetFile, options: ClusterOptions, installed: Installation) -> dict[str, Plan]:
    """Plan each host of the file. Raise UsageProblem."""
    try:
        return {host: host_plan(file.fleet, options, host, installed) for host in file.fleet.hosts}
    except FleetError as error:
        raise UsageProblem(f"{file.path}: {error}") from error


def _etcd_command(folder: RunFolder, tls: bool, port: int) -> list[str]:
    certificates = Path(
        certificate_folder(str(folder.data / "certs"), ETCD_SERVER.role.value, ETCD_SERVER.name)
    )
    return etcd_command(folder.data / "etcd", port, certificates if tls else None)
