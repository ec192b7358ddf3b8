"""The output of commands: results on stdout (a table or a JSON object), progress and errors on stderr."""

from __future__ import annotations

import enum
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
from rich.cells import cell_len

from tailrace.cli.errors import UsageProblem
from tailrace.cli.plain import JsonValue

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Column, Table

F = TypeVar("F", bound=Callable[..., Any])

_YAML: Final = "tailrace.cli.output.yaml"
_WIDE: Final = 240
"""Least width of what is written to a pipe."""
_WIDTH_MAX: Final = 10_000
# Spaces between two columns of a table without borders.
_GAP: Final = 2


class Output(enum.StrEnum):
    """The values of `-o`."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    TREE = "tree"
    CSV = "csv"


def output_option(first: Output = Output.TABLE, *more: Output) -> Callable[[F], F]:
    """Add `-o first|json` and `more`; the command gets an `Output` as `output`."""

    def convert(context: click.Context, _parameter: click.Parameter, value: str) -> Output:
        context.meta[_YAML] = value == "yaml"
        # The same figures, in other words.
        return Output.JSON if context.meta[_YAML] else Output(value)

    return click.option(
        "-o",
        "--output",
        type=click.Choice([first.value, Output.JSON.value, "yaml", *(output.value for output in more)]),
        default=first.value,
        show_default=True,
        callback=convert,
        help="json, yaml: one object on stdout.",
    )


def print_json(value: dict[str, JsonValue]) -> None:
    """Print an object as JSON or as a YAML document, as `-o` asks.

    JSON is on one line unless stdout is a terminal, so that `--watch` prints JSON lines.
    """
    if _as_yaml():
        click.echo(_to_yaml(value, explicit_start=True), nl=False)
    else:
        click.echo(json.dumps(value, indent=2 if sys.stdout.isatty() else None))


def _as_yaml() -> bool:
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(_YAML))


def _to_yaml(value: object, explicit_start: bool = False) -> str:
    # Imported here, since most commands print no YAML.
    import yaml

    return yaml.safe_dump(value, sort_keys=False, explicit_start=explicit_start)


def print_json_list(name: str, values: Iterable[dict[str, JsonValue]]) -> None:
    """Print an object whose only key has a list, each element as it arrives; JSON or YAML, as `-o` asks.

    If the first one cannot be had, nothing is printed.
    """
    arriving = iter(values)
    first = list(islice(arriving, 1))
    if _as_yaml():
        click.echo(f"---\n{name}:" + ("" if first else " []"))
        for value in chain(first, arriving):
            click.echo(_to_yaml([value]), nl=False)
        return
    on_terminal = sys.stdout.isatty()
    separator = "\n" if on_terminal else ""
    click.echo(f"{{{separator}{json.dumps(name)}: [", nl=False)
    for value in chain(first, arriving):
        text = json.dumps(value, indent=2 if on_terminal else None)
        click.echo(separator + text, nl=False)
        separator = ",\n" if on_terminal else ", "
    click.echo("]}")


def print_figures(renderable: RenderableType) -> None:
    """Print a table or text to stdout, without trailing spaces.

    What cannot wrap and is wider than the terminal continues on its next line: nothing is cut off.
    """
    target = console()
    unlimited = target.options.update(max_width=_WIDTH_MAX)
    target.width = max(target.width, target.measure(renderable, options=unlimited).minimum)
    with target.capture() as captured:
        target.print(renderable)
    for line in captured.get().splitlines():
        click.echo(line.rstrip())


def full_width(table: Table) -> Table:
    """Give the columns of a table with all of its rows the width of their texts, whatever the terminal's;
    return it."""
    for column in table.columns:
        column.min_width = _natural_width(column)
    return table


def fit(table: Table, width: int, shrinking: Mapping[str, int]) -> Table:
    """Fit a table without borders, with all of its rows, to a live view of this width; return it.

    Columns in `shrinking` give way first, to so many characters each, by heading; then columns are left out
    from the right. Rich would cut off every text somewhere.
    """
    widths = [_natural_width(column) for column in table.columns]
    excess = sum(widths) + _GAP * (len(widths) - 1) - width
    for at, column in enumerate(table.columns):
        if (least := shrinking.get(str(column.header))) is not None:
            cut = max(0, min(excess, widths[at] - least))
            widths[at], excess = widths[at] - cut, excess - cut
        column.min_width = column.max_width = widths[at]
    while excess > 0 and len(widths) > 1:
        table.columns.pop()
        excess -= widths.pop() + _GAP
    return table


def _natural_width(column: Column) -> int:
    """Return the width of a column's widest line, heading included."""
    return max(_cell_width(cell) for cell in (column.header, *column.cells))


def _cell_width(cell: RenderableType) -> int:
    if isinstance(cell, str):
        return max(map(cell_len, cell.split("\n")))
    return console().measure(cell).maximum


def console() -> Console:
    """Return a console on stdout; if that is a pipe, one of a width that rarely truncates."""
    # Imported here, since commands that print no table need it not.
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else _WIDE, highlight=False)


def require_terminal(instead: str) -> None:
    """Raise UsageProblem if a live view would go to a pipe or a file, which show nothing until its end."""
    if not sys.stdout.isatty():
        raise UsageProblem(f"stdout is no terminal, which a live view needs: {instead}")


def note(text: str) -> None:
    """Print a line of progress to stderr."""
    click.echo(text, err=True)
