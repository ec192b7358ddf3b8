"""`tailrace get`: show the state of the cluster as a table or as JSON."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
from google.protobuf.message import Message

from tailrace.brief_help import WholeGroup
from tailrace.cli.admin import CALL_TIMEOUT_S, Admin, admin_option, connect
from tailrace.cli.output import (
    Output,
    console,
    fit,
    note,
    output_option,
    print_figures,
    print_json,
    print_json_list,
    require_terminal,
)
from tailrace.cli.plain import JsonValue, enum_word, enum_words, to_plain, to_plain_list
from tailrace.cli.tables import (
    INSTANCES,
    MIGRATIONS,
    POLICIES,
    POOLS,
    PROFILES,
    REQUESTS,
    SERVICES,
    SHRINKING,
    STAGES,
    View,
    lines,
)
from tailrace.messages import slo_of
from tailrace.numeric import WholeRange
from tailrace.slo import assignments
from tailrace.v1.admin_pb2 import (
    GetShadowRequest,
    GetSloRequest,
    InstanceInfo,
    ListProfilesRequest,
    ListRequestsRequest,
    ListStagesRequest,
    PolicyInfo,
    PolicyParameter,
    RequestInfo,
    RequestOrder,
)
from tailrace.v1.types_pb2 import Phase, Pool

if TYPE_CHECKING:
    from rich.table import Table

F = TypeVar("F", bound=Callable[..., Any])
RowT = TypeVar("RowT", bound=Message)

_WATCH_INTERVAL_S: Final = 1.0
_ROWS: Final = 500
"""Most requests in a table unless the user says otherwise."""
_SHORT: Final = 100
"""Rows up to which a table is rich's, which fits it to the terminal."""
_HINT: Final = "tailrace get instances lists the instances"
_PHASES: Final = {word: Phase.ValueType(number) for word, number in enum_words(Phase.DESCRIPTOR).items()}
_ORDERS: Final = {
    "instance": RequestOrder.REQUEST_ORDER_UNSPECIFIED,
    "age": RequestOrder.REQUEST_ORDER_OLDEST,
}


class _Kinds(WholeGroup):
    """Kinds of things, by their plural; the singular is taken, too."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of a kind."""
        plurals = (cmd_name, f"{cmd_name}s", f"{cmd_name.removesuffix('y')}ies")
        return next((self.commands[name] for name in plurals if name in self.commands), None)


@click.group(cls=_Kinds, epilog="Example: tailrace get requests --watch")
def get() -> None:
    """Show the state of the cluster. With -o json: one object whose only key is the kind."""


def _options(*more: Output) -> Callable[[F], F]:
    """Add the options of a kind. `more`: further values of -o."""
    watch = click.option(
        "-w", "--watch", is_flag=True, help="Refresh every second until Ctrl-C (-o json: one line each)."
    )
    return lambda function: output_option(Output.TABLE, *more)(watch(admin_option(function)))


@get.command(epilog="Example: tailrace get instances -o json")
@_options(Output.WIDE)
def instances(output: Output, watch: bool, admin: str | None) -> None:
    """Instances: state, pool, load by phase, KV use, migration method (-o json: with the reason)."""
    _show(INSTANCES, Admin.instances, output, watch, admin)


@get.command(epilog="Example: tailrace get pools")
@_options()
def pools(output: Output, watch: bool, admin: str | None) -> None:
    """The pool of each instance."""
    _show(POOLS, Admin.instances, output, watch, admin, plain=_plain_pools)


@get.command(epilog="Example: tailrace get stages")
@_options()
def stages(output: Output, watch: bool, admin: str | None) -> None:
    """Length ranges and the instances that serve them."""
    _show(
        STAGES,
        lambda admin: admin.stub.ListStages(ListStagesRequest(), timeout=CALL_TIMEOUT_S).stages,
        output,
        watch,
        admin,
    )


@get.command(epilog="Example: tailrace get requests --instance worker-0 --phase reasoning --limit 20")
@click.option("--instance", default="", metavar="INSTANCE", help="Only requests on this instance.")
@click.option("--phase", type=click.Choice(list(_PHASES)), help="Only requests in this phase.")
@click.option(
    "--sort",
    type=click.Choice(list(_ORDERS)),
    default="instance",
    show_default=True,
    help="instance: by instance and id; age: the oldest first.",
)
@click.option(
    "--limit",
    type=WholeRange(min=0),
    help=f"Maximum number; 0: all. Default: {_ROWS} in a table, all with -o json.",
)
@_options(Output.WIDE)
def requests(
    instance: str,
    phase: str | None,
    sort: str,
    limit: int | None,
    output: Output,
    watch: bool,
    admin: str | None,
) -> None:
    """Running requests: instance, phase, epoch, lengths in tokens.

    If there are more than the limit, the last line, on stderr, says how many. Many requests are fetched in
    pages, each as of its own moment, and written as they arrive.
    """
    most = ((0 if output is Output.JSON else _ROWS) if limit is None else limit) or None
    listing = ListRequestsRequest(
        instance_id=instance, phase=_PHASES[phase] if phase else Phase.PHASE_UNSPECIFIED, order=_ORDERS[sort]
    )
    with connect(admin) as connection, connection.errors(_HINT):
        if watch:
            _watch(
                lambda: _requests_table(connection, listing, most, output),
                lambda: {REQUESTS.name: to_plain_list(connection.requests(listing, most))},
                output,
            )
        elif output is Output.JSON:
            print_json_list(REQUESTS.name, map(to_plain, connection.requests(listing, most)))
        else:
            _print_requests(connection, listing, most, _requests_view(listing, output))


@get.command(epilog="Example: tailrace get migrations --limit 5")
@click.option(
    "--request",
    "request_id",
    default="",
    metavar="REQUEST",
    help="Only migrations of this request; its ID, or its client's.",
)
@click.option(
    "--limit", type=WholeRange(min=1), default=50, show_default=True, help="Maximum number, latest first."
)
@_options(Output.WIDE)
def migrations(request_id: str, limit: int, output: Output, watch: bool, admin: str | None) -> None:
    """Migrations: rounds, bytes, pause in milliseconds and decode steps."""
    _show(MIGRATIONS, lambda admin: admin.migrations(limit, request_id), output, watch, admin)


@get.command(epilog="Example: tailrace get policies")
@_options()
def policies(output: Output, watch: bool, admin: str | None) -> None:
    """Installed policies, and the active one with its parameters (-o json: all parameters)."""
    _show(POLICIES, Admin.policies, output, watch, admin, plain=_plain_policies)


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
    from rich.table import Table

    table = Table(title=f"{found.policy}, {found.name} in its shadow", title_justify="left", box=None)
    table.add_column("decision point")
    for heading in ("same", "different", "failed"):
        table.add_column(heading, justify="right")
    for count in found.counts:
        table.add_row(count.point, str(count.same), str(count.different), str(count.failed))
    print_figures(table)
    if found.suspended:
        click.echo(f"{found.name} is suspended, and not asked any more: {found.suspended}")


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
@_options()
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
@_options()
def services(output: Output, watch: bool, admin: str | None) -> None:
    """Services, their addresses and which ones lead."""
    _show(SERVICES, Admin.services, output, watch, admin)


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
    if output is Output.WIDE:
        view = view.wide()
    with connect(address) as admin, admin.errors(_HINT):
        if watch:
            _watch(lambda: view.table(fetch(admin)), lambda: {view.name: plain(fetch(admin))}, output)
        elif output is Output.JSON:
            print_json({view.name: plain(fetch(admin))})
        else:
            _print_table(view, fetch(admin))


def _print_table(view: View[RowT], rows: Sequence[RowT]) -> None:
    if len(rows) <= _SHORT:
        print_figures(view.table(rows))
        return
    for line in lines(view, [rows]):
        click.echo(line)


def _requests_view(listing: ListRequestsRequest, output: Output) -> View[RequestInfo]:
    """Return REQUESTS with a caption that names the filters: other requests may be running."""
    phase = enum_word(Phase.DESCRIPTOR, listing.phase)
    where = f" on {listing.instance_id}" if listing.instance_id else ""
    view = REQUESTS.wide() if output is Output.WIDE else REQUESTS
    return replace(view, empty=f"no requests are {f'in phase {phase}' if phase else 'running'}{where}")


def _print_requests(
    admin: Admin, listing: ListRequestsRequest, limit: int | None, view: View[RequestInfo]
) -> None:
    fetched = admin.request_pages(listing, limit)
    first = next(fetched)
    if not first.next_page_token:
        _print_table(view, first.requests)
        shown, total = len(first.requests), first.total_size
    else:
        shown = total = 0

        def rows() -> Iterator[Sequence[RequestInfo]]:
            nonlocal shown, total
            for page in chain([first], fetched):
                shown, total = shown + len(page.requests), page.total_size
                yield page.requests

        for line in lines(view, rows()):
            click.echo(line)
    if limit is not None and shown < total:
        note(_more(shown, total))


def _requests_table(admin: Admin, listing: ListRequestsRequest, limit: int | None, output: Output) -> Table:
    found = list(admin.request_pages(listing, limit))
    table = _requests_view(listing, output).table(request for page in found for request in page.requests)
    shown, total = len(table.rows), found[-1].total_size
    if limit is not None and shown < total:
        table.caption, table.caption_justify = _more(shown, total), "left"
    return table


def _more(shown: int, total: int) -> str:
    return f"{shown} of {total} requests; --limit 0 lists all"


def _watch(table: Callable[[], Table], document: Callable[[], dict[str, JsonValue]], output: Output) -> None:
    """Show the table, or the document, every second until Ctrl-C. Raise UsageProblem."""
    if output is not Output.JSON:
        require_terminal("without --watch it is shown once, and -o json writes a line every second")
    try:
        if output is Output.JSON:
            while True:
                print_json(document())
                time.sleep(_WATCH_INTERVAL_S)
        from rich.live import Live

        terminal = console()
        with Live(fit(table(), terminal.width, SHRINKING), console=terminal, auto_refresh=False) as live:
            while True:
                time.sleep(_WATCH_INTERVAL_S)
                live.update(fit(table(), terminal.width, SHRINKING), refresh=True)
    except KeyboardInterrupt:
        return
