"""`tailrace record`: record the inputs and decisions of the leading scheduler."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, Final

import click

from tailrace.cli.admin import admin_option, connect
from tailrace.cli.errors import CliError, file_errors
from tailrace.cli.output import note
from tailrace.numeric import Duration
from tailrace.v1.admin_pb2 import RecordRequest

# Time beyond the recording itself for its first lines, one per instance.
_MARGIN_S: Final = 10.0


@click.command(epilog="Example: tailrace record run.jsonl --for 30")
@click.argument("file", type=click.Path(dir_okay=False, writable=True, path_type=Path))
@click.option(
    "--for",
    "seconds",
    type=Duration(min=0, max=3600, min_open=True),
    default=600.0,
    show_default=True,
    help="Seconds to record; Ctrl-C ends earlier.",
)
@admin_option
def record(file: Path, seconds: float, admin: str | None) -> None:
    """Write the leading scheduler's state, its inputs from now on, and its decisions to FILE.

    JSON lines, without the text of any prompt or answer, for tailrace replay. FILE is replaced as soon as the
    recording begins; if it ends early, what FILE has by then can be replayed.
    """
    lines = 0
    with connect(admin) as connection, file_errors(path=file), ExitStack() as opened:
        call = connection.stub.Record(RecordRequest(seconds=seconds), timeout=seconds + _MARGIN_S)
        target: BinaryIO | None = None
        try:
            with connection.errors():
                for reply in call:
                    if target is None:
                        # Not earlier: a recording that does not begin must not empty the file of another.
                        target = opened.enter_context(file.open("wb"))
                    # At once, so that Ctrl-C does not separate an input from the decisions on it.
                    target.write(b"".join(line + b"\n" for line in reply.lines))
                    lines += len(reply.lines)
        except KeyboardInterrupt:
            call.cancel()
        except CliError as error:
            if not lines:
                raise
            raise CliError(f"{file}: {lines} lines, then the recording ended: {error.message}") from error
    if not lines:
        raise CliError(f"{file}: nothing was recorded")
    note(f"{file}: {lines} lines")
