"""`tailrace doctor`: what this host or the fleet lacks, and how to mend it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Final

import click

from tailrace.address import parse_address
from tailrace.cli.admin import Admin, address_option, connect, given_tls
from tailrace.cli.errors import CliError, Unreachable
from tailrace.cli.fleet_file import file_option, host_of, options_of, plans, read_fleet_file, require_alone
from tailrace.cli.line import ranks_of
from tailrace.cli.line_check import refusal
from tailrace.cli.output import Output, note, output_option, print_json
from tailrace.cli.plain import JsonValue
from tailrace.cli.tables import instance_word
from tailrace.fleet.file import Fleet
from tailrace.fleet.hosts import ANYWHERE, endpoints, own_admins
from tailrace.fleet.hosts import admin as admin_address
from tailrace.local.host_checks import Finding, Host, Verdict, check_host, ok
from tailrace.local.options import ClusterOptions
from tailrace.local.plan import PartSpec, Tier
from tailrace.local.ports import LOOPBACK
from tailrace.local.requirements import INSTALL_VLLM, gpu_bytes, visible_gpus, vllm_version
from tailrace.local.state import Part, RunFolder, RunFolderUnusable, RunState, find_state
from tailrace.numeric import WholeRange
from tailrace.security.options import exposed
from tailrace.service.vllm_line import VllmCommand, read_line
from tailrace.tiny import MODEL_PATH
from tailrace.v1.types_pb2 import INSTANCE_STATE_ACTIVE, INSTANCE_STATE_DRAINING

# Of which one must lead.
_LED: Final = ("scheduler", "monitor", "migration")
_MARKS: Final = {Verdict.OK: "ok", Verdict.NOTE: "note", Verdict.PROBLEM: "PROBLEM"}


@click.command(cls=VllmCommand, epilog="Example: tailrace doctor Qwen/Qwen3-8B -tp 2 --etcd 10.0.0.1:2379")
@click.option("--etcd", metavar="HOST:PORT[,..]", envvar="TAILRACE_ETCD", help="Members of etcd to look at.")
@click.option(
    "--port", type=WholeRange(1, 65535), default=8000, show_default=True, help="HTTP port that must be free."
)
@click.option(
    "--api-keys",
    type=click.Path(dir_okay=False, path_type=Path),
    envvar="TAILRACE_API_KEYS",
    metavar="FILE",
    help="File of users' API keys to look at.  [default: that of the cluster that runs here]",
)
@file_option(required=False)
@click.option("--on", metavar="HOST", help="The host of the --file that this machine is, if it has several.")
@output_option()
@address_option
def doctor(
    etcd: str | None,
    port: int,
    api_keys: Path | None,
    file: Path | None,
    on: str | None,
    output: Output,
    admin: str | None,
    arguments: Sequence[str],
) -> None:
    """Look for what this host lacks, and the fleet if one is reached; say how to mend it.

    Takes a `vllm serve` line, for the model and the sizes, or a fleet.yaml. --tls: the folder of a service
    or an operator.
    Exit code 1 if there is a problem.
    """
    # The admin APIs of models' own clusters, by the names of the models, and whether others share one.
    own: Mapping[str, str] = {}
    shared = True
    if file is not None:
        require_alone("on", "output", "admin", "tls")
        source = read_fleet_file(file)
        fleet, options, name = source.fleet, options_of(source), host_of(source, on)
        models, edge, reached = [*options.models], bool(options.edge), True
        if name:
            plan = plans(source, options, ANYWHERE)[name]
            here = {part.option("--model") for part in plan.parts}
            models = [each for each in models if each.model in here]
            edge = bool(plan.tier(Tier.EDGE))
            reached = edge or (bool(plan.tier(Tier.FRONTEND)) and not options.edge)
        model, ranks = (models[0].model, max(each.ranks for each in models)) if models else ("", 1)
        # Of users' addresses and keys the file has been checked as a whole.
        served = [replace(each, frontend_arguments=("--insecure",)) for each in models]
        http = parse_address(fleet.http or fleet.model.http) if reached else None
        etcd = ",".join(endpoints(fleet)) if name else ""
        api_keys = source.beside(fleet.keys) if fleet.keys else None
        if name and not admin:
            admin, own = admin_address(fleet), _own_admins(fleet, options)
            # Where each model has its own, the fleet's has only the edge.
            shared = len(own) < len(options.models)
    else:
        line = read_line(arguments)
        model, http, edge = line.model, (LOOPBACK, port), False
        keys = ("--api-keys", str(api_keys)) if api_keys else ()
        users = line.last("host") or LOOPBACK
        served = [
            ClusterOptions(line=line.without("model", "host", "port"), host=users, frontend_arguments=keys)
        ]
        ranks = ranks_of(line)
    try:
        cluster = None if admin else find_state()
    except RunFolderUnusable as error:
        raise CliError(str(error)) from error
    host = Host(
        environment={**os.environ, **({} if cluster is None else cluster.environment)},
        gpus=visible_gpus(),
        gpu_bytes=gpu_bytes(),
        model=model,
        ranks=max(1, ranks),
        # A cluster that runs here has it.
        http=None if cluster is not None else http,
        edge=edge,
        etcd=tuple(etcd.split(",")) if etcd else (),
        certificates=given_tls(),
        api_keys=api_keys or (None if cluster is None or file is not None else _keys_of(cluster)),
        folder=RunFolder.default().path,
    )
    flags = chain.from_iterable(map(_flags, served))
    ended = [] if cluster is None else _ended(cluster)
    # What follows from an end, and is mended with it, is said once. --admin may name another cluster.
    known = set[str]()
    if cluster is not None and not admin:
        known.update(subject for part in ended for subject in _consequences(part, cluster))
    fleet_findings = [
        finding
        for finding in _clusters(admin, own, shared, cluster)
        if finding.verdict is Verdict.OK or finding.subject not in known
    ]
    findings = [*check_host(host), *flags, *map(_has_ended, ended), *fleet_findings]
    problems = sum(finding.verdict is Verdict.PROBLEM for finding in findings)
    if output is Output.JSON:
        listed: list[JsonValue] = [
            {**asdict(finding), "verdict": finding.verdict.value} for finding in findings
        ]
        print_json({"findings": listed, "problems": problems})
    else:
        for finding in findings:
            click.echo(f"{_MARKS[finding.verdict]:8} {finding.subject}: {finding.detail}")
            if finding.mend:
                click.echo(f"{'':8}   -> {finding.mend}")
        click.echo(f"{problems} problem{'' if problems == 1 else 's'}")
    if problems:
        sys.exit(1)


def _flags(options: ClusterOptions) -> Iterator[Finding]:
    """Yield what a worker, a front end and vLLM say of the flags."""
    # Of the model's folder there is another check.
    options = replace(options, model=str(MODEL_PATH))
    if not options.line.arguments and options.host == LOOPBACK:
        return
    if not vllm_version():
        yield Finding("flags", Verdict.NOTE, "not checked, because vLLM is not installed here", INSTALL_VLLM)
        return
    note("tailrace doctor: checking the flags, for which vLLM is loaded")
    try:
        problem = refusal(options)
    except CliError as error:
        problem = error.message
    mend = "tailrace up --help=all lists vLLM's, --help=NAME says what one takes"
    yield Finding("flags", Verdict.PROBLEM, problem, mend) if problem else ok("flags", "vLLM takes them")


def _keys_of(state: RunState) -> Path | None:
    """Return the file of API keys that a process of this folder's cluster reads; None: none does."""
    for part in state.staying:
        given = part.spec.option("--api-keys")
        if given and part.identity.alive():
            return Path(state.directory, given)
    return None


def _ended(state: RunState) -> list[Part]:
    """Return the processes of this folder's cluster that have ended by themselves."""
    scaled = {name for each in state.scaled for name in each.names}
    return [part for part in state.staying if part.name not in scaled and not part.identity.alive()]


def _has_ended(part: Part) -> Finding:
    mend = f"tailrace restart {part.name}; {part.log} may say why"
    return Finding(part.name, Verdict.PROBLEM, "it has ended", mend)


def _consequences(part: Part, state: RunState) -> Iterator[str]:
    """Yield the subjects of what is found in the part's cluster because this process has ended."""
    spec = part.spec
    if spec.tier is Tier.WORKER:
        subjects = [*(f"instance {member}" for member in spec.members), "instances"]
    else:
        # A kind of which none leads, or none is there; without a scheduler nothing is known.
        subjects = [spec.kind, "fleet"] if spec.kind == "scheduler" else [spec.kind]
    cluster = spec.option("--cluster")
    model = next((of for of, each in _schedulers(state) if each.option("--cluster") == cluster), "")
    yield from (f"{model}: {subject}" if model else subject for subject in subjects)


def _own_models(state: RunState) -> dict[str, str]:
    """Return the models with clusters of their own, by the addresses of their admin APIs."""
    return {admin: model for model, admin in reversed(state.models.items()) if admin != state.admin}


def _schedulers(state: RunState) -> Iterator[tuple[str, PartSpec]]:
    """Yield the schedulers of this machine, each with the model whose own cluster it has, or empty."""
    models = _own_models(state)
    for part in state.parts:
        if part.spec.kind == "scheduler":
            yield models.get(part.spec.address, ""), part.spec


def _own_admins(fleet: Fleet, options: ClusterOptions) -> dict[str, str]:
    """Return the addresses of the admin APIs of models' own clusters, by the names of the models."""
    addresses = own_admins(fleet, options)
    return {each.served_name: addresses[each.own.name] for each in options.models if each.own is not None}


def _clusters(
    address: str | None, own: Mapping[str, str], shared: bool, state: RunState | None
) -> Iterator[Finding]:
    """Yield what the admin APIs say of the fleet's cluster, and of those of single models.

    With `address`, that is the fleet's, `own` are the others by model, and `shared` says whether the fleet's
    has models. Without, they are those that run here.
    """
    if address or state is None:
        yield from _fleet(address, serves=shared)
        asked: list[tuple[str, str | None, str | None]] = [
            (model, admin, None) for model, admin in own.items()
        ]
    else:
        here = _own_models(state)
        serves = not here or state.admin in state.models.values()
        yield from _fleet(None, serves=serves, unreachable=_unreachable("", state))
        asked = [(model, None, model) for model in reversed(here.values())]
    for name, admin, model in asked:
        unreachable = "" if state is None else _unreachable(name, state)
        for finding in _fleet(admin, model, unreachable=unreachable):
            yield replace(finding, subject=f"{name}: {finding.subject}")


def _unreachable(model: str, state: RunState) -> str:
    """Return what to do if no scheduler of the cluster that runs here answers, or of that of one model."""
    names = [spec.name for of, spec in _schedulers(state) if of == model]
    return f"tailrace logs {names[0]} may say why" if names else "read a scheduler's log on its host"


def _fleet(
    address: str | None, model: str | None = None, serves: bool = True, unreachable: str = ""
) -> Iterator[Finding]:
    """Yield what the admin API says of one cluster. `serves`: whether it has instances and front ends;
    `unreachable`: what to do if it cannot be asked, if it was started here."""
    try:
        with connect(address, model) as admin, admin.errors():
            yield from _services(admin, serves)
            if serves:
                yield from _instances(admin)
            for policy in admin.policies():
                if policy.active and policy.suspended:
                    mend = "tailrace set policy NAME lifts it; mend the policy, or set another"
                    yield Finding(f"policy {policy.name}", Verdict.PROBLEM, policy.suspended, mend)
                elif policy.active:
                    yield ok("policy", policy.name)
    except Unreachable as error:
        if address:
            yield Finding("fleet", Verdict.PROBLEM, error.message, "start it, or correct --admin")
        elif unreachable:
            yield Finding("fleet", Verdict.PROBLEM, error.message, unreachable)
        else:
            yield ok("fleet", "none is running here, and --admin names none")
    except CliError as error:
        yield Finding("fleet", Verdict.PROBLEM, error.message, "correct --admin, or --tls")


def _services(admin: Admin, serves: bool) -> Iterator[Finding]:
    services = admin.services()
    for kind in _LED:
        if not any(service.leader for service in services if service.kind == kind):
            mend = f"start tailrace serve {kind}, or read its log"
            yield Finding(kind, Verdict.PROBLEM, "none leads", mend)
    if serves and not any(service.kind == "frontend" for service in services):
        yield Finding("frontend", Verdict.PROBLEM, "there is none", "start tailrace serve frontend")
    for service in services:
        if service.metrics_address and exposed([service.address]) and not exposed([service.metrics_address]):
            detail = f"its metrics are on {service.metrics_address}: Prometheus elsewhere sees none"
            mend = "--metrics with an address that others reach"
            yield Finding(f"{service.kind} {service.id}", Verdict.NOTE, detail, mend)
    yield ok("services", f"{len(services)}")


def _instances(admin: Admin) -> Iterator[Finding]:
    instances = admin.instances()
    for instance in instances:
        if instance.state not in (INSTANCE_STATE_ACTIVE, INSTANCE_STATE_DRAINING):
            mend = "read its log; it comes back by itself once it reports"
            detail = instance_word(instance.state)
            yield Finding(f"instance {instance.instance_id}", Verdict.PROBLEM, detail, mend)
    if not any(instance.state == INSTANCE_STATE_ACTIVE for instance in instances):
        yield Finding("instances", Verdict.PROBLEM, "none takes requests", "start tailrace serve worker")
    yield ok("instances", f"{len(instances)}")
