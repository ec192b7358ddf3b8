"""`tailrace get`: show the state of the cluster as a table or as JSON."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import click
from google.protobuf.message import Message
from rich.live import Live
from rich.table import Table

from tailrace.cli.admin import CALL_TIMEOUT_S, Admin, admin_option, connect
from tailrace.cli.output import Output, console, output_option, print_figures, print_json
from tailrace.cli.plain import JsonValue, enum_word, to_plain, to_plain_list
from tailrace.cli.tables import (
    INSTANCES,
    MIGRATIONS,
    POLICIES,
    POOLS,
    PROFILES,
    REQUESTS,
    SERVICES,
    STAGES,
    View,
)
from tailrace.messages import slo_of
from tailrace.slo import assignments
from tailrace.v1.admin_pb2 import (
    GetShadowRequest,
    GetSloRequest,
    InstanceInfo,
    ListInstancesRequest,
    ListPoliciesRequest,
    ListProfilesRequest,
    ListRequestsRequest,
    ListServicesRequest,
    ListStagesRequest,
    PolicyInfo,
    PolicyParameter,
)
from tailrace.v1.migration_pb2 import ListMigrationsRequest
from tailrace.v1.types_pb2 import Pool

F = TypeVar("F", bound=Callable[..., Any])
RowT = TypeVar("RowT", bound=Message)

_WATCH_INTERVAL_S = 1.0


@click.group(epilog="Example: tailrace get requests --watch")
def get() -> None:
    """Show the state of the cluster. With -o json: one object whose only key is the kind."""


def _options(function: F) -> F:
    watch = click.option(
        "--watch", is_flag=True, help="Refresh every second until Ctrl-C (-o json: one line each)."
    )
    return output_option()(watch(admin_option(function)))


@get.command(epilog="Example: tailrace get instances -o json")
@_options
def instances(output: Output, watch: bool, admin: str | None) -> None:
    """Instances: state, pool, load by phase, KV use, migration method (-o json: with the reason)."""
    _show(INSTANCES, _instances, output, watch, admin)


@get.command(epilog="Example: tailrace get pools")
@_options
def pools(output: Output, watch: bool, admin: str | None) -> None:
    """The pool of each instance."""
    _show(POOLS, _instances, output, watch, admin, plain=_plain_pools)


@get.command(epilog="Example: tailrace get stages")
@_options
def stages(output: Output, watch: bool, admin: str | None) -> None:
    """Length ranges and the instances that serve them."""
    _show(
        STAGES,
        lambda admin: admin.stub.ListStages(ListStagesRequest(), timeout=CALL_TIMEOUT_S).stages,
        output,
        watch,
        admin,
    )


@get.command(epilog="Example: tailrace get requests --instance worker-0")
@click.option("--instance", default="", metavar="INSTANCE", help="Only requests on this instance.")
@_options
def requests(instance: str, output: Output, watch: bool, admin: str | None) -> None:
    """Running requests: instance, phase, epoch, lengths in tokens."""
    request = ListRequestsRequest(instance_id=instance)
    _show(
        REQUESTS,
        lambda admin: admin.stub.ListRequests(request, timeout=CALL_TIMEOUT_S).requests,
        output,
        watch,
        admin,
    )


@get.command(epilog="Example: tailrace get migrations --limit 5")
@click.option(
    "--request", "request_id", default="", metavar="REQUEST", help="Only migrations of this request."
)
@click.option(
    "--limit", type=click.IntRange(min=1), default=50, show_default=True, help="Maximum number, latest first."
)
@_options
def migrations(request_id: str, limit: int, output: Output, watch: bool, admin: str | None) -> None:
    """Migrations: rounds, bytes, pause in milliseconds and decode steps."""
    request = ListMigrationsRequest(request_id=request_id, limit=limit)
    _show(
        MIGRATIONS,
        lambda admin: admin.stub.ListMigrations(request, timeout=CALL_TIMEOUT_S).migrations,
        output,
        watch,
        admin,
    )


@get.command(epilog="Example: tailrace get policies")
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="Include the papers' baselines, and names for policies with fixed parameters.",
)
@_options
def policies(everything: bool, output: Output, watch: bool, admin: str | None) -> None:
    """Installed policies, and the active one with its parameters (-o json: all parameters)."""
    request = ListPoliciesRequest(all=everything)
    _show(
        POLICIES,
        lambda admin: admin.stub.ListPolicies(request, timeout=CALL_TIMEOUT_S).policies,
        output,
        watch,
        admin,
        plain=_plain_policies,
    )


@get.command(epilog="Example: tailrace get shadow")
@output_option()
@admin_option
def shadow(output: Output, admin: str | None) -> None:
    """The shadow policy, and how often its decisions differ from the active policy's."""
    with connect(admin) as connection, connection.errors("tailrace set shadow NAME sets one"):
        found = connection.stub.GetShadow(GetShadowRequest(), timeout=CALL_TIMEOUT_S)
    if output is Output.JSON:
        print_json({"shadow": {**to_plain(found), "counts": to_plain_list(found.counts)}})
        return
    if not found.name:
        click.echo(f"policy: {found.policy}, shadow: -")
        return
    table = Table(title=f"{found.policy}, {found.name} in its shadow", title_justify="left", box=None)
    table.add_column("decision point")
    for heading in ("same", "different", "failed"):
        table.add_column(heading, justify="right")
    for count in found.counts:
        table.add_row(count.point, str(count.same), str(count.different), str(count.failed))
    print_figures(table)


@get.command(epilog="Example: tailrace get slo")
@output_option()
@admin_option
def slo(output: Output, admin: str | None) -> None:
    """The deployment's service-level objectives."""
    with connect(admin) as connection, connection.errors():
        found = slo_of(connection.stub.GetSlo(GetSloRequest(), timeout=CALL_TIMEOUT_S).slo)
    if output is Output.JSON:
        print_json({"slo": asdict(found)})
    else:
        click.echo(assignments(found))


@get.command(epilog="Example: tailrace get profiles -o json")
@_options
def profiles(output: Output, watch: bool, admin: str | None) -> None:
    """Measured profiles (tailrace profile), by kind of instance."""
    _show(
        PROFILES,
        lambda admin: admin.stub.ListProfiles(ListProfilesRequest(), timeout=CALL_TIMEOUT_S).profiles,
        output,
        watch,
        admin,
    )


@get.command(epilog="Example: tailrace get services")
@_options
def services(output: Output, watch: bool, admin: str | None) -> None:
    """Services, their addresses and which ones lead."""
    _show(
        SERVICES,
        lambda admin: admin.stub.ListServices(ListServicesRequest(), timeout=CALL_TIMEOUT_S).services,
        output,
        watch,
        admin,
    )


def _instances(admin: Admin) -> Sequence[InstanceInfo]:
    return admin.stub.ListInstances(ListInstancesRequest(), timeout=CALL_TIMEOUT_S).instances


def _plain_policies(rows: Sequence[PolicyInfo]) -> list[JsonValue]:
    return [{**to_plain(row), "parameters": [_plain_parameter(p) for p in row.parameters]} for row in rows]


def _plain_parameter(parameter: PolicyParameter) -> dict[str, JsonValue]:
    """Convert default and value to the parameter's type; the value is null unless the policy is active."""
    value = _typed(parameter.type, parameter.value) if parameter.value else None
    return {**to_plain(parameter), "default": _typed(parameter.type, parameter.default), "value": value}


def _typed(kind: str, word: str) -> JsonValue:
    match kind:
        case "int":
            return int(word)
        case "float":
            return float(word)
        case "bool":
            return word == "true"
    return word


def _plain_pools(rows: Sequence[InstanceInfo]) -> list[JsonValue]:
    return [{"instance_id": row.instance_id, "pool": enum_word(Pool.DESCRIPTOR, row.pool)} for row in rows]


def _show(
    view: View[RowT],
    fetch: Callable[[Admin], Sequence[RowT]],
    output: Output,
    watch: bool,
    address: str | None,
    plain: Callable[[Sequence[RowT]], list[JsonValue]] = to_plain_list,
) -> None:
    with connect(address) as admin, admin.errors("tailrace get instances lists the instances"):
        if watch:
            _watch(view, lambda: fetch(admin), output, plain)
        elif output is Output.JSON:
            print_json({view.name: plain(fetch(admin))})
        else:
            print_figures(view.table(fetch(admin)))


def _watch(
    view: View[RowT],
    fetch: Callable[[], Sequence[RowT]],
    output: Output,
    plain: Callable[[Sequence[RowT]], list[JsonValue]],
) -> None:
    """Show the view every second until Ctrl-C."""
    try:
        if output is Output.JSON:
            while True:
                print_json({view.name: plain(fetch())})
                time.sleep(_WATCH_INTERVAL_S)
        with Live(view.table(fetch()), console=console(), auto_refresh=False) as live:
            while True:
                time.sleep(_WATCH_INTERVAL_S)
                live.update(view.table(fetch()), refresh=True)
    except KeyboardInterrupt:
        return
