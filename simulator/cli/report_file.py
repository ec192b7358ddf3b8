"""`--report FILE`: where the HTML goes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from tailrace.cli.errors import CliError
from tailrace.cli.output import note

F = TypeVar("F", bound=Callable[..., Any])


def report_option(function: F) -> F:
    """Add --report; its folder must exist before anything is simulated."""

    def checked(_context: click.Context, _parameter: click.Parameter, value: Path | None) -> Path | None:
        if value is not None and not value.parent.is_dir():
            raise click.BadParameter(f"there is no folder {value.parent}")
        return value

    return click.option(
        "--report",
        type=click.Path(dir_okay=False, path_type=Path),
        callback=checked,
        help="Write a page with plots, in one HTML file.",
    )(function)


def write_report(path: Path, html: str) -> None:
    """Write the page and say where. Raises CliError."""
    try:
        path.write_text(html, encoding="utf-8")
    except OSError as error:
        raise CliError(f"--report: {path}: {error.strerror}") from error
    note(f"report: {path}")
