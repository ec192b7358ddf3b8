"""What commands print: figures on stdout (a table, or one JSON object), progress and errors on stderr."""

from __future__ import annotations

import enum
import json
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click
from rich.console import Console, RenderableType

from tailrace.cli.plain import JsonValue

F = TypeVar("F", bound=Callable[..., Any])

_WIDE = 240
"""Columns of a table that goes to a pipe: nothing is cut."""


class Output(enum.StrEnum):
    """What `-o` takes."""

    TABLE = "table"
    JSON = "json"
    TREE = "tree"
    CSV = "csv"


def output_option(first: Output = Output.TABLE, *more: Output) -> Callable[[F], F]:
    """Add `-o first|json` and whatever else; the command gets an `Output` as `output`."""

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
    """One object; on one line when stdout is no terminal, so that `--watch` gives JSON lines."""
    click.echo(json.dumps(value, indent=2 if sys.stdout.isatty() else None))


def print_figures(renderable: RenderableType) -> None:
    """A table or text, to stdout; in a pipe without the spaces that fill lines up."""
    target = console()
    if target.is_terminal:
        target.print(renderable)
        return
    with target.capture() as captured:
        target.print(renderable)
    for line in captured.get().splitlines():
        click.echo(line.rstrip())


def console() -> Console:
    """A console on stdout that cuts nothing when stdout is a pipe."""
    return Console(width=None if sys.stdout.isatty() else _WIDE, highlight=False)


def note(text: str) -> None:
    """A line of progress, to stderr."""
    click.echo(text, err=True)
