"""Checks of `tailrace serve` command lines without running them."""

from __future__ import annotations

from collections.abc import Sequence

import click

from tailrace.cli.serve import serve


def parse_serve(arguments: Sequence[str]) -> None:
    """Parse SERVICE OPTION... as `tailrace serve` would. Raises click.UsageError."""
    context = click.Context(serve, info_name="serve")
    name, command, rest = serve.resolve_command(context, list(arguments))
    assert command is not None
    command.make_context(name, rest, parent=context)
