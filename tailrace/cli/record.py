"""`tailrace record`: record the inputs and decisions of the leading scheduler, or only its load."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import BinaryIO, Final

import click

from tailrace.cli.admin import Admin, admin_option, connect
from tailrace.cli.errors import CliError, file_errors
from tailrace.cli.output import note
from tailrace.control.arrivals import NothingEndedError, RecordedLoad
from tailrace.control.recording import InvalidRecordingError, decode
from tailrace.files import replacement
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
    help="Seconds to record; Ctrl-C and SIGTERM end earlier.",
)
@click.option(
    "--arrivals",
    is_flag=True,
    help="Write only when requests arrive and how long they are: a jsonl:FILE workload of tailrace size, "
    "simulate and compare.",
)
@admin_option
def record(file: Path, seconds: float, arrivals: bool, admin: str | None) -> None:
    """Write the leading scheduler's state, its inputs from now on, and its decisions to FILE.

    JSON lines, without the text of any prompt or answer, for tailrace replay. FILE is replaced as soon as the
    recording begins; if it ends early, what FILE has by then can be replayed. With --arrivals, FILE is
    replaced at the end.
    """
    problems = file_errors(InvalidRecordingError, NothingEndedError, path=file)
    with connect(admin) as connection, problems, _terminated_as_interrupted():
        batches = _batches(connection, seconds)
        if arrivals:
            _record_load(file, batches)
        else:
            _record(file, batches)


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Let SIGTERM end the block as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _batches(connection: Admin, seconds: float) -> Iterator[Sequence[bytes]]:
    """Yield the recorded lines as they come, an input and the decisions on it together."""
    call = connection.stub.Record(RecordRequest(seconds=seconds), timeout=seconds + _MARGIN_S)
    try:
        with connection.errors():
            for reply in call:
                yield reply.lines
    finally:
        call.cancel()


def _record(file: Path, batches: Iterator[Sequence[bytes]]) -> None:
    lines = 0
    with ExitStack() as opened:
        target: BinaryIO | None = None
        try:
            for batch in batches:
                if target is None:
                    # Not earlier: a recording that does not begin must not empty the file of another.
                    target = opened.enter_context(file.open("wb"))
                # At once, so that Ctrl-C does not separate an input from the decisions on it.
                target.write(b"".join(line + b"\n" for line in batch))
                lines += len(batch)
        except KeyboardInterrupt:
            pass
        except CliError as error:
            if not lines:
                raise
            raise CliError(f"{file}: {lines} lines, then the recording ended: {error.message}") from error
    if not lines:
        raise CliError(f"{file}: nothing was recorded")
    note(f"{file}: {lines} lines")


def _record_load(file: Path, batches: Iterator[Sequence[bytes]]) -> None:
    with ExitStack() as opened:
        # Now, and not when there is something to lose.
        try:
            if file.is_file() or not file.exists():
                target = opened.enter_context(replacement(file, _new_file_mode()))
            else:
                # A pipe or a device, which cannot be replaced.
                target = opened.enter_context(file.open("wb"))
        except OSError as error:
            raise CliError(f"{file}: {error.strerror}") from error
        load, ended = _load_of(batches)
        rows = list(load.rows())
        target.write(b"".join(json.dumps(row, separators=(",", ":")).encode() + b"\n" for row in rows))
    if load.models > 1:
        note(f"{load.models} models: their requests are in one file, as if for one")
    drawn = f", {load.unfinished} unfinished, with lengths of others" if load.unfinished else ""
    if ended:
        raise CliError(f"{file}: {len(rows)} requests{drawn}{ended}")
    note(f"{file}: {len(rows)} requests{drawn}")


def _new_file_mode() -> int:
    """Return the mode that a new file gets by this process's umask, which can be read only by setting it."""
    os.umask(mask := os.umask(0))
    return 0o666 & ~mask


def _load_of(batches: Iterator[Sequence[bytes]]) -> tuple[RecordedLoad, str]:
    """Return what was recorded, and why it ended early; "": it did not."""
    load, ended = RecordedLoad(), ""
    try:
        for line in decode(chain.from_iterable(batches)):
            load.add(line)
    except KeyboardInterrupt:
        pass
    except CliError as error:
        if not len(load):
            raise
        ended = f", then the recording ended: {error.message}"
    if load.ends_early:
        ended = ", then the recording ended: this command could not keep up"
    return load, ended
