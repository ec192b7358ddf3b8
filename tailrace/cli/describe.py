"""`tailrace describe`: everything that is known of one instance, request or migration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any, Final

import click

from tailrace.cli.admin import Admin, admin_option, connect
from tailrace.cli.errors import CliError, UsageProblem
from tailrace.cli.output import Output, output_option, print_json
from tailrace.cli.plain import JsonValue, to_plain, to_plain_list
from tailrace.request_ids import matching
from tailrace.v1.admin_pb2 import ListRequestsRequest

_MIGRATIONS: Final = 1_000
_KINDS: Final = {"instance": "instance_id", "request": "request_id", "migration": "migration_id"}
# Names in an error.
_SHOWN: Final = 5
_INDENT: Final = "  "
# Fields that are seconds since the Unix epoch.
_MOMENTS: Final = ("opened_s", "closed_s")

Plain = dict[str, JsonValue]


class _Kind(click.Choice[str]):
    """Kinds of things; the plural is taken, too."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the kind. Raise click.BadParameter."""
        singular = str(value).removesuffix("s")
        return super().convert(singular if singular in _KINDS else value, param, ctx)


@click.command(epilog="Example: tailrace describe request chatcmpl-8f3a")
@click.argument("kind", type=_Kind(list(_KINDS)))
@click.argument("name")
@output_option()
@admin_option
def describe(kind: str, name: str, output: Output, admin: str | None) -> None:
    """Show everything that is known of one instance, running request or migration.

    NAME is its ID or a unique part of it. An instance comes with its requests, a request with its migrations.
    """
    with connect(admin) as connection, connection.errors(f"tailrace get {kind}s lists them"):
        found = _one(kind, name, list(_all(connection, kind)))
        if kind == "instance":
            here = ListRequestsRequest(instance_id=str(found["instance_id"]))
            found["requests"] = [each.request_id for each in connection.requests(here)]
        elif kind == "request":
            of_request = connection.migrations(_MIGRATIONS, str(found["request_id"]))
            found["migrations"] = to_plain_list(of_request)
    if output is Output.JSON:
        print_json({kind: found})
    else:
        for line in _lines(found):
            click.echo(line)


def _all(admin: Admin, kind: str) -> Iterator[Plain]:
    """Yield all objects of a kind."""
    if kind == "instance":
        yield from map(to_plain, admin.instances())
    elif kind == "request":
        yield from map(to_plain, admin.requests(ListRequestsRequest()))
    else:
        yield from map(to_plain, admin.migrations(_MIGRATIONS))


def _one(kind: str, name: str, found: Sequence[Plain]) -> Plain:
    """Return the object with this ID, or a unique part of it. Raise CliError."""
    ids = {str(each[_KINDS[kind]]): each for each in found}
    fitting = [name] if name in ids else matching(name, ids)
    if len(fitting) == 1:
        return ids[fitting[0]]
    if fitting:
        more = " ..." if len(fitting) > _SHOWN else ""
        several = f"{name!r} is part of {len(fitting)} {kind}s: {', '.join(fitting[:_SHOWN])}{more}"
        raise UsageProblem(f"{several}; give more of one")
    ended = "; of one that has ended, tailrace trace shows what it did" if kind == "request" else ""
    raise CliError(f"no {kind} {name!r}; tailrace get {kind}s lists them{ended}")


def _lines(value: Plain, indent: str = "") -> Iterator[str]:
    """Yield one line per field; what fields contain is indented."""
    width = max(map(len, value), default=0) + 2
    for name, inner in value.items():
        if isinstance(inner, dict) and inner:
            yield f"{indent}{name}:"
            yield from _lines(inner, indent + _INDENT)
        elif isinstance(inner, list) and inner and isinstance(inner[0], dict):
            for number, each in enumerate(inner):
                yield f"{indent}{name}[{number}]:"
                yield from _lines(each, indent + _INDENT)  # type: ignore[arg-type]
        else:
            word = _moment(inner) if name in _MOMENTS else _word(inner)
            yield f"{indent}{f'{name}:':{width}}{word}"


def _moment(value: JsonValue) -> str:
    """Return a time of day; a dash for what has not happened."""
    if not isinstance(value, int | float) or not value:
        return "-"
    return datetime.fromtimestamp(value).astimezone().isoformat(" ", "milliseconds")


def _word(value: JsonValue) -> str:
    if isinstance(value, list):
        return ", ".join(map(_word, value)) or "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    return "-" if value in (None, "", {}) else str(value)
