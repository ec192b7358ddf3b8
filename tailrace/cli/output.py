"""The output of commands: results on stdout (a table or a JSON object), progress and errors on stderr."""

from __future__ import annotations

import enum
import json
import sys
from collections.abc import Callable, Iterable
from itertools import chain, islice
from typing import Any, TypeVar

import click
from rich.console import Console, RenderableType

from tailrace.cli.plain import JsonValue

F = TypeVar("F", bound=Callable[..., Any])

_WIDE = 240
"""Width of a table written to a pipe, so that nothing is truncated."""


class Output(enum.StrEnum):
    """The values of `-o`."""

    TABLE = "table"
    JSON = "json"
    TREE = "tree"
    CSV = "csv"


def output_option(first: Output = Output.TABLE, *more: Output) -> Callable[[F], F]:
    """Add `-o first|json` and `more`; the command gets an `Output` as `output`."""

    def convert(_context: click.Context, _parameter: click.Parameter, value: str) -> Output:
        return Output(value)

    return click.option(
        "-o",
        "--output",
        type=click.Choice([first.value, Output.JSON.value, *(output.value for output in more)]),
        default=first.value,
        show_default=True,
        callback=convert,
        help="json: one object on stdout.",
    )


def print_json(value: dict[str, JsonValue]) -> None:
    """Print a JSON object; on one line unless stdout is a terminal, so that `--watch` prints JSON lines."""
    click.echo(json.dumps(value, indent=2 if sys.stdout.isatty() else None))


def print_json_list(name: str, values: Iterable[dict[str, JsonValue]]) -> None:
    """Print a JSON object whose only key has a list, each element as it arrives.

    If the first one cannot be had, nothing is printed.
    """
    arriving = iter(values)
    first = list(islice(arriving, 1))
    on_terminal = sys.stdout.isatty()
    separator = "\n" if on_terminal else ""
    click.echo(f"{{{separator}{json.dumps(name)}: [", nl=False)
    for value in chain(first, arriving):
        text = json.dumps(value, indent=2 if on_terminal else None)
        click.echo(separator + text, nl=False)
        separator = ",\n" if on_terminal else ", "
    click.echo("]}")


def print_figures(renderable: RenderableType) -> None:
    """Print a table or text to stdout; without trailing spaces unless stdout is a terminal."""
    target = console()
    if target.is_terminal:
        target.print(renderable)
        return
    with target.capture() as captured:
        target.print(renderable)
    for line in captured.get().splitlines():
        click.echo(line.rstrip())


def console() -> Console:
    """Return a console on stdout that does not truncate if stdout is a pipe."""
    return Console(width=None if sys.stdout.isatty() else _WIDE, highlight=False)


def note(text: str) -> None:
    """Print a line of progress to stderr."""
    click.echo(text, err=True)
