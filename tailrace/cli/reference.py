"""docs/cli.md, from the commands themselves.

python -m tailrace.cli.reference > docs/cli.md
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import click

from tailrace.cli.main import main

_COLUMNS: Final = 110
_INTRODUCTION: Final = """\
# Commands

This page is written by `python -m tailrace.cli.reference` from the commands' own help; a test holds the two
equal. Every option of a service can also be given in the environment variable `TAILRACE_SERVE_ARGS`.
"""


def reference() -> str:
    """The page."""
    context = click.Context(main, info_name="tailrace", terminal_width=_COLUMNS, max_content_width=_COLUMNS)
    parts = [_INTRODUCTION]
    for path, text in _helps(main, context):
        parts.append(f"## `{path}`\n\n```\n{text}\n```\n")
    return "\n".join(parts)


def _helps(command: click.Command, context: click.Context) -> Iterator[tuple[str, str]]:
    """The command's path and help, then those of its subcommands."""
    lines = (line.rstrip() for line in command.get_help(context).splitlines())
    yield context.command_path, "\n".join(lines)
    if not isinstance(command, click.Group):
        return
    for name in command.list_commands(context):
        inner = command.get_command(context, name)
        if inner is not None and not inner.hidden:
            yield from _helps(inner, click.Context(inner, info_name=name, parent=context))


if __name__ == "__main__":
    print(reference(), end="")
