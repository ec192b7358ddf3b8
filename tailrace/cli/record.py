"""`tailrace record`: record the inputs and decisions of the leading scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click

from tailrace.cli.admin import admin_option, connect
from tailrace.cli.errors import CliError, file_errors
from tailrace.cli.output import note
from tailrace.v1.admin_pb2 import RecordRequest

# Time beyond the recording itself for its first lines, one per instance.
_MARGIN_S: Final = 10.0


@click.command(epilog="Example: tailrace record run.jsonl --for 30")
@click.argument("file", type=click.Path(dir_okay=False, writable=True, path_type=Path))
@click.option(
    "--for",
    "seconds",
    type=click.FloatRange(min=0, max=3600, min_open=True),
    default=600.0,
    show_default=True,
    help="Seconds to record; Ctrl-C ends earlier.",
)
@admin_option
def record(file: Path, seconds: float, admin: str | None) -> None:
    """Write the leading scheduler's state, its inputs from now on, and its decisions to FILE.

    The format is JSON lines with IDs, lengths, phases and hashes of KV blocks, without the text of any prompt
    or answer. tailrace replay FILE runs a policy on them again.
    """
    lines = 0
    with connect(admin) as connection, connection.errors(), file_errors(), file.open("wb") as target:
        call = connection.stub.Record(RecordRequest(seconds=seconds), timeout=seconds + _MARGIN_S)
        try:
            for reply in call:
                for line in reply.lines:
                    target.write(line + b"\n")
                lines += len(reply.lines)
        except KeyboardInterrupt:
            call.cancel()
    if not lines:
        raise CliError(f"{file}: nothing was recorded")
    note(f"{file}: {lines} lines")
