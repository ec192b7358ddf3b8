"""`tailrace apply`: bring a running cluster to what its file says."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import click

from tailrace.address import parse_address
from tailrace.cli.admin import CALL_TIMEOUT_S, address_option, connect
from tailrace.cli.errors import CliError, UsageProblem
from tailrace.cli.fleet_file import (
    FleetFile,
    admins_of,
    file_option,
    host_of,
    options_of,
    plan_here,
    plans,
    read_fleet_file,
)
from tailrace.cli.output import note
from tailrace.cli.set import policy_text
from tailrace.cli.up import on_this_machine, require_startable
from tailrace.fleet.hosts import ANYWHERE, own_admins
from tailrace.fleet.hosts import admin as admin_address
from tailrace.local.certificates import OPERATOR, certify, transport_of
from tailrace.local.change import Changes, compare, differing, scaling_changes, within
from tailrace.local.options import DEFAULT_CLUSTER, MONITOR_TRACES, ClusterOptions, Front, OwnCluster
from tailrace.local.plan import SPANS, PartSpec, Plan, Tier, environment_of
from tailrace.local.ports import PortUnavailable, require_free
from tailrace.local.process import PartFailed
from tailrace.local.progress import make_progress
from tailrace.local.restart import Restarter
from tailrace.local.start import may_set_rights, own_settings, set_rights
from tailrace.local.state import Part, RunFolder, RunFolderBusy, RunFolderUnusable, RunState
from tailrace.messages import given_objectives, objectives_message
from tailrace.security.roles import Identity, Role
from tailrace.v1.admin_pb2 import GetSloRequest, PolicyParameter, SetPolicyRequest, SetSloRequest

_NOT_NOW: Final = "cannot be changed while the cluster runs; tailrace down, then tailrace up"


@dataclass(frozen=True, slots=True)
class _Settings:
    """What differs of policy and SLO of a cluster, and a line for each."""

    # The cluster, as `connect` takes it.
    address: str | None
    model: str | None
    policy: SetPolicyRequest | None
    slo: SetSloRequest | None
    lines: Sequence[tuple[str, str]]

    def apply(self) -> None:
        """Make them as the file says."""
        with connect(self.address, self.model) as admin, admin.errors():
            if self.policy is not None:
                admin.stub.SetPolicy(self.policy, timeout=CALL_TIMEOUT_S)
            if self.slo is not None:
                admin.stub.SetSlo(self.slo, timeout=CALL_TIMEOUT_S)


@click.command(epilog="Example: tailrace apply -f fleet.yaml --dry-run")
@file_option(required=True)
@click.option("--on", metavar="HOST", help="The host of the file that this machine is, if it has several.")
@click.option("--dry-run", is_flag=True, help="Show what would change.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.option("--force", is_flag=True, help="Also change what ends streams.")
@click.option(
    "--model", metavar="NAME", help="With --admin: it is a scheduler of this model, with a policy of its own."
)
@address_option
def apply(
    file: Path, on: str | None, dry_run: bool, yes: bool, force: bool, model: str | None, admin: str | None
) -> None:
    """Bring a running cluster to what the file says, while it serves.

    Policy, parameters and SLO are set. Of the cluster that tailrace up started in this folder, new processes
    are started, changed ones restarted one after another, and others stopped; requests move meanwhile. On
    other hosts, it says what is missing. Shows what changes, and asks.
    """
    source = read_fleet_file(file)
    folder = RunFolder.nearest()
    try:
        # Another user's cluster cannot be read.
        state = None if admin else folder.read()
        if state is None:
            _apply_afar(source, admin, model, dry_run, yes)
            return
        # While somebody is asked, other commands work, and models at zero start.
        with folder.locked() if yes else contextlib.nullcontext():
            state = folder.read()
            if state is None:
                raise CliError("the cluster of this folder has just been stopped")
            if not state.ready:
                raise CliError("the cluster of this folder is not complete; tailrace down stops it")
            _apply_here(source, folder, state, host_of(source, on or state.host or None), dry_run, yes, force)
    except (RunFolderBusy, RunFolderUnusable, PartFailed) as error:
        raise CliError(str(error)) from error


def _as_running(options: ClusterOptions, state: RunState) -> ClusterOptions:
    """Return the options with the API servers that models have, where the file leaves them open: what this
    machine could have by now is no change of the file."""

    def of(model: ClusterOptions) -> ClusterOptions:
        name = f"{model.prefix}frontend"
        fronts = {
            part.spec.option("--front") or Front.PYTHON
            for part in state.parts
            if part.tier is Tier.FRONTEND and part.name.startswith(name)
        }
        if model.front is not Front.AUTO or not fronts:
            return model
        return replace(model, front=Front.BOTH if len(fronts) > 1 else Front(fronts.pop()))

    models = [of(each) for each in options.models]
    return replace(models[0], others=tuple(models[1:]))


def _apply_here(
    source: FleetFile, folder: RunFolder, state: RunState, host: str, dry_run: bool, yes: bool, force: bool
) -> None:
    """Change policy, SLO and the processes of this folder's cluster. `yes`: its lock is held."""
    if host != state.host:
        raise UsageProblem(
            f"this folder's cluster runs host {state.host or '-'} of its file, not {host or '-'}"
        )
    for part in state.staying:
        if part.tier is Tier.ETCD and not part.identity.alive():
            raise CliError(
                f"{part.name} has ended, which keeps the fleet's state: tailrace restart {part.name}"
            )
    options = on_this_machine(_as_running(options_of(source), state), source.fleet.model.number)
    plan = plan_here(options, folder, source, host)
    if bool(plan.certificates) != bool(state.certificates):
        raise UsageProblem(f"tls: {_NOT_NOW}")
    environment = _environment(plan, state, options)
    changes = _changes(plan, state, environment)
    require_possible(changes, state.parts)
    _require_changes_startable(changes, state.parts, options, host)
    answering, new = _own_clusters(options, plan, state)
    settings = [_settings(source, None), *(_settings(source, None, model) for model in answering)]
    lines = [
        *(line for each in settings for line in each.lines),
        *_first_settings(new),
        *scaling_changes(state.scaled, plan.scaled),
        *_lines(changes, state),
    ]
    problems = [] if force else [*dangers(changes, state.parts)]
    if not _agreed(lines, problems, dry_run, yes):
        return
    with contextlib.nullcontext() if yes else folder.locked():
        if folder.read() != state:
            raise CliError("another command, or the scaler, has changed the cluster meanwhile: try again")
        # First, so that new workers are placed on by the right policy.
        for each in settings:
            each.apply()
        state.scaled = [*plan.scaled]
        if changes:
            plan = replace(plan, etcd=state.etcd)
            asyncio.run(_carry_out(changes, folder, state, environment, plan, options, [*new.values()]))
        state.policy = options.policy
        folder.write(state)
    click.echo("applied")


def _require_changes_startable(
    changes: Changes, running: Sequence[Part], options: ClusterOptions, host: str
) -> None:
    """Check what is started before anything is stopped for it. Raise UsageProblem if a worker or a front end
    would refuse what it is given, or users' port is taken."""
    started = [spec.name for spec in (*changes.added, *changes.changed)]
    ours = {_address(part.spec)[1] for part in running if part.spec.http and part.identity.alive()}
    for spec in (*changes.added, *changes.changed):
        if spec.http and _address(spec)[1] not in ours:
            try:
                require_free(*_address(spec))
            except PortUnavailable as error:
                raise UsageProblem(
                    f"http: {spec.http}: the port is in use, or cannot be listened on"
                ) from error
    for model in options.models:
        names = f"{model.prefix}{Tier.WORKER.value}", f"{model.prefix}{Tier.FRONTEND.value}"
        if any(name.startswith(names) for name in started):
            require_startable("apply", model, host)


def _address(spec: PartSpec) -> tuple[str, int]:
    """Return users' host and port of a part that has them."""
    return parse_address(spec.http.partition("://")[2])


def _own_clusters(
    options: ClusterOptions, plan: Plan, state: RunState
) -> tuple[Sequence[ClusterOptions], Mapping[str, OwnCluster]]:
    """Return the models whose own clusters have schedulers, and by model those that get their first ones."""
    answering: list[ClusterOptions] = []
    new: dict[str, OwnCluster] = {}
    for model in options.models:
        if model.own is None:
            continue
        # Of a fleet on several hosts, it may have none here.
        led_here = any(_leads(spec, model.own.name) for spec in plan.parts)
        known = model.served_name in state.models
        if known and (not led_here or _schedulers(state, model.own.name, alive=True)):
            answering.append(model)
        elif led_here:
            new[model.served_name] = model.own
    return answering, new


def _first_settings(new: Mapping[str, OwnCluster]) -> Iterator[tuple[str, str]]:
    """Yield a line for what is set in each new cluster."""
    for model, own in new.items():
        yield f"policy of {model}", policy_text(own.policy, own.policy_parameters)
        for name, value in own.objectives.items():
            yield f"slo of {model}", f"{name} {value:g}"


def _apply_afar(source: FleetFile, address: str | None, model: str | None, dry_run: bool, yes: bool) -> None:
    """Change policies and SLOs of a fleet, and say what its hosts lack."""
    fleet, options = source.fleet, options_of(source)
    if not address and not fleet.hosts:
        raise CliError("no cluster is running in this folder; tailrace up -f starts one")
    own = {each.served_name: each for each in options.models if each.own is not None}
    if model is not None and (model not in own or not address):
        known = ", ".join(own) or "none"
        raise UsageProblem(f"--model: with --admin, one of those with a policy or slo of their own: {known}")
    if model is not None:
        settings = [_settings(source, address, own[model])]
    else:
        settings = [_settings(source, address or admin_address(fleet))]
        admins = own_admins(fleet, options) if fleet.hosts else {}
        for name, each in own.items():
            if each.own is not None and each.own.name in admins:
                settings.append(_settings(source, admins[each.own.name], each))
            else:
                note(f"policy and slo of {name}: --admin with a scheduler of its cluster, and --model {name}")
    lines = [line for cluster in settings for line in cluster.lines]
    missing = [*_missing(source, options, settings)] if fleet.hosts and model is None else []
    if _agreed([*lines, *missing], [], dry_run, yes):
        for cluster in settings:
            cluster.apply()
        click.echo("applied; processes are started on their hosts" if missing else "applied")


def _settings(source: FleetFile, address: str | None, model: ClusterOptions | None = None) -> _Settings:
    """Compare policy and SLO of the fleet, or of a model with its own cluster, with those in force."""
    fleet = source.fleet
    served, of = None, ""
    name, given, objectives = fleet.policy.name, fleet.policy.texts, fleet.objectives()
    if model is not None and model.own is not None:
        # An address says which cluster is meant.
        served, of = None if address else model.served_name, f" of {model.served_name}"
        name, given = model.own.policy, {**model.own.policy_parameters}
        objectives = {**model.own.objectives}
    lines = []
    with connect(address, served) as admin, admin.errors():
        policies = admin.policies()
        before = given_objectives(admin.stub.GetSlo(GetSloRequest(), timeout=CALL_TIMEOUT_S).slo)
    active = next((policy for policy in policies if policy.active), None)
    wanted = policy_text(name, given)
    policy = None
    if active is None or active.name != name or active.suspended or not _equal(active.parameters, given):
        now = "-" if active is None else policy_text(active.name, _changed(active.parameters))
        lines.append((f"policy{of}", f"{now} -> {wanted}"))
        policy = SetPolicyRequest(name=name, parameters=given)
    objectives = {name: value for name, value in objectives.items() if before.get(name, 0.0) != value}
    lines += [
        (f"slo{of}", f"{name} {before.get(name, 0.0):g} -> {value:g}") for name, value in objectives.items()
    ]
    slo = SetSloRequest(slo=objectives_message(objectives)) if objectives else None
    return _Settings(address, served, policy, slo, lines)


def _equal(parameters: Sequence[PolicyParameter], given: Mapping[str, str]) -> bool:
    """Return whether the parameters in force are the given ones, and otherwise the defaults."""
    return all(_same(each.value, given.get(each.name, each.default)) for each in parameters)


def _same(one: str, other: str) -> bool:
    with contextlib.suppress(ValueError):
        return float(one) == float(other)
    return one == other


def _changed(parameters: Sequence[PolicyParameter]) -> dict[str, str]:
    return {each.name: each.value for each in parameters if not _same(each.value, each.default)}


def _environment(plan: Plan, state: RunState, options: ClusterOptions) -> Mapping[str, str]:
    """Return the environment of all parts; spans go on to the same monitor."""
    environment = dict(plan.environment)
    monitors = [part.spec for part in state.parts if part.name == "monitor"]
    if options.traces == MONITOR_TRACES and not state.host and monitors and SPANS not in options.environment:
        environment[SPANS] = environment_of(options, monitors[0].address)[SPANS]
    return environment


def _schedulers(state: RunState, cluster: str, alive: bool = False) -> str:
    """Return the addresses of the schedulers of a cluster that are to run here, or that do."""
    return ",".join(
        part.spec.address
        for part in state.parts
        if _leads(part.spec, cluster) and (part.identity.alive() or not alive)
    )


def _leads(spec: PartSpec, cluster: str) -> bool:
    """Return whether a part is a scheduler of the cluster."""
    own = spec.option("--cluster") or DEFAULT_CLUSTER
    return spec.kind == "scheduler" and own == cluster


def _note_admins(state: RunState, plan: Plan, options: ClusterOptions) -> None:
    """Have the state say where the admin APIs are."""
    if state.host:
        state.admin, own = plan.admin, plan.own
    else:
        state.admin = _schedulers(state, plan.cluster)
        own = {name: _schedulers(state, name) for name in plan.own}
    state.models = admins_of(options, state.admin, own)


def _changes(plan: Plan, state: RunState, environment: Mapping[str, str]) -> Changes:
    known = {each.model for each in state.scaled}
    changes = compare(state.staying, within(plan, state.parts, known), state.etcd)
    # One that has ended is as the file says only once it runs again.
    again = {
        part.name for part in state.staying if environment != state.environment or not part.identity.alive()
    }
    if not again:
        return changes
    untouched = {spec.name for spec in (*changes.added, *changes.changed)} | set(changes.removed)
    rest = [part.spec for part in state.parts if part.name in again and part.name not in untouched]
    return replace(
        changes, changed=[*changes.changed, *(spec for spec in rest if spec.tier is not Tier.ETCD)]
    )


def _lines(changes: Changes, state: RunState) -> Iterator[tuple[str, str]]:
    """Yield a line for each part that changes."""
    old = {part.name: part.spec for part in state.parts}
    ended = {part.name for part in state.parts if not part.identity.alive()}
    for spec in changes.added:
        yield spec.name, "start"
    for spec in changes.changed:
        differs = differing(old[spec.name].command, spec.command)
        yield (
            spec.name,
            f"restart: {differs or ('it ended' if spec.name in ended else 'another environment')}",
        )
    for name in changes.removed:
        yield name, "stop"


def require_possible(changes: Changes, running: Sequence[Part]) -> None:
    """Raise UsageProblem for what cannot be changed part by part."""
    specs = {part.name: part.spec for part in running}
    # With an edge, it has the address that front ends have without.
    ports = {spec.http: spec for spec in specs.values() if spec.http}
    for new in (*changes.added, *changes.changed):
        if new.http in ports and ports[new.http].tier is not new.tier:
            raise UsageProblem(
                f"{new.name}: {new.http} is {ports[new.http].name}'s; whether there is an edge (front, http) "
                f"{_NOT_NOW}"
            )
    for new in changes.changed:
        old = specs[new.name]
        clusters = old.option("--cluster"), new.option("--cluster")
        if clusters[0] != clusters[1] and any("." in cluster for cluster in clusters):
            raise UsageProblem(
                f"{new.name}: a model with a policy or slo of its own has a cluster of its own: apply the "
                "file without the model, then with it; or tailrace down, then tailrace up"
            )
        if clusters[0] != clusters[1]:
            raise UsageProblem(f"cluster: {_NOT_NOW}")
        if tuple(old.members) != tuple(new.members):
            # Their ids would be in use in the old processes.
            raise UsageProblem(f"models[0].replicas: so many simulated workers share processes; {_NOT_NOW}")


def dangers(changes: Changes, running: Sequence[Part]) -> Iterator[str]:
    """Yield what would end streams."""
    specs = {part.name: part.spec for part in running}
    # One that has ended has no requests.
    workers = {part.name for part in running if part.tier is Tier.WORKER and part.identity.alive()}
    touched = {spec.name for spec in changes.changed} | set(changes.removed)
    for spec in changes.changed:
        old = specs[spec.name]
        if spec.tier is Tier.WORKER and any(
            spec.option(flag) != old.option(flag) for flag in ("--model", "--engine")
        ):
            yield (
                f"{spec.name}: a stream does not go on with another model: add workers with the new one and "
                "tailrace rollout start"
            )
    gone = set(changes.removed)
    for model, members in _by_model(workers, specs).items():
        alone = len(members) == 1 and members <= touched
        replaced = any(spec.tier is Tier.WORKER and _model(spec) == model for spec in changes.added)
        # Its front ends, if they go too, first finish what it has.
        finished = members <= gone and _front_ends(specs, model) <= gone
        if alone and not replaced and not finished:
            yield f"{min(members)}: it is the only worker, and nobody takes over its requests: add one first"


def _model(spec: PartSpec) -> tuple[str, str]:
    """Return what a worker's requests can go on with: a model, in its cluster."""
    return spec.option("--cluster"), spec.option("--model")


def _by_model(workers: set[str], specs: Mapping[str, PartSpec]) -> dict[tuple[str, str], set[str]]:
    by_model: dict[tuple[str, str], set[str]] = {}
    for name in workers & specs.keys():
        by_model.setdefault(_model(specs[name]), set()).add(name)
    return by_model


def _front_ends(specs: Mapping[str, PartSpec], model: tuple[str, str]) -> set[str]:
    return {name for name, spec in specs.items() if spec.tier is Tier.FRONTEND and _model(spec) == model}


def _missing(
    source: FleetFile, options: ClusterOptions, clusters: Sequence[_Settings]
) -> Iterator[tuple[str, str]]:
    """Yield what the hosts lack, or have beside what the file says."""
    running: set[str] = set()
    for cluster in clusters:
        with connect(cluster.address) as admin, admin.errors():
            running |= {each.instance_id for each in admin.instances()}
            running |= {each.id for each in admin.services()}
    wanted: set[str] = set()
    for host, plan in plans(source, options, ANYWHERE).items():
        names = [part.name for part in plan.parts if part.tier is not Tier.ETCD]
        wanted.update(names)
        for name in names:
            if name not in running:
                yield name, f"to be started on host {host}: tailrace render, and its start.sh"
    for name in sorted(running - wanted):
        yield name, "runs, and is not in the file: stop it on its host"


def _agreed(lines: Sequence[tuple[str, str]], problems: Sequence[str], dry_run: bool, yes: bool) -> bool:
    """Show what changes; return whether to go on. Raise UsageProblem if it must not."""
    if not lines:
        click.echo("nothing to change: the cluster is as the file says")
        return False
    width = max(len(name) for name, _ in lines)
    for name, text in lines:
        click.echo(f"{name:{width}}  {text}")
    if problems:
        raise UsageProblem("\n".join([*problems, "--force does it all the same"]))
    if dry_run:
        return False
    if not yes and not sys.stdin.isatty():
        raise UsageProblem("--yes: needed where nobody can be asked")
    return yes or click.confirm("Change this?")


async def _carry_out(
    changes: Changes,
    folder: RunFolder,
    state: RunState,
    environment: Mapping[str, str],
    plan: Plan,
    options: ClusterOptions,
    new: Sequence[OwnCluster],
) -> None:
    """Start, restart and stop parts, one after another: those first that take over from others.

    `new`: clusters whose policy and SLO are set as soon as they have schedulers.
    """
    names = [*(spec.name for spec in (*changes.added, *changes.changed)), *changes.removed]
    with make_progress(names, "tailrace apply") as progress:
        restarter = Restarter(folder, state, progress, environment)
        if state.certificates and not state.host:
            certify(state.certificates, (Identity(Role(spec.role), spec.name) for spec in changes.added))
        if plan.own and may_set_rights(state.certificates):
            await set_rights(plan)
        control = [spec for spec in changes.added if spec.tier is Tier.CONTROL]
        restarted = [spec for spec in changes.changed if spec.tier is Tier.CONTROL]
        for spec in control:
            await restarter.add(spec)
        for spec in restarted:
            await restarter.restart(spec.name, changed=spec)
        # Of those that are stopped below, too: they may be the ones that answer until then.
        _note_admins(state, plan, options)
        transport = transport_of(state.certificates, OPERATOR)
        for own in new:
            await own_settings(own).apply(_schedulers(state, own.name), transport)
        for spec in changes.added:
            if spec.tier is not Tier.CONTROL:
                await restarter.add(spec)
        for spec in changes.changed:
            if spec.tier is not Tier.CONTROL:
                await restarter.restart(spec.name, changed=spec)
        # A front end finishes its streams on its workers.
        gone = [part for part in state.parts if part.name in changes.removed]
        for part in sorted(gone, key=lambda part: -part.place):
            await restarter.remove(part.name)
    _note_admins(state, plan, options)
    # Last: what is interrupted before is carried out by the next apply.
    state.environment = dict(environment)
    state.http, state.model = plan.http, options.served_name
    state.workers = sum(len(part.spec.members) for part in state.parts)
