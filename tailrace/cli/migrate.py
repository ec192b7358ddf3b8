"""`tailrace migrate`: move one running request, and watch it move."""

from __future__ import annotations

from typing import Final

import click

from tailrace.cli.admin import admin_option, connect
from tailrace.cli.errors import CliError
from tailrace.cli.output import Output, note, output_option, print_json
from tailrace.cli.plain import to_plain
from tailrace.cli.tables import bytes_text, copied_text, migration_word, phase_word
from tailrace.v1.admin_pb2 import AdminMigrateRequest
from tailrace.v1.migration_pb2 import MigrationRecord
from tailrace.v1.types_pb2 import (
    MIGRATION_STATE_ABORTED,
    MIGRATION_STATE_COMMITTED,
    MIGRATION_STATE_GONE,
    MIGRATION_STATE_UNKNOWN,
)
from tailrace.v1.worker_pb2 import COPY_MODE_PRE_COPY, COPY_MODE_STOP_AND_COPY, CopyMode

_TIMEOUT_S: Final = 120.0
_MODES: Final[dict[str, CopyMode.ValueType]] = {
    "pre-copy": COPY_MODE_PRE_COPY,
    "stop-and-copy": COPY_MODE_STOP_AND_COPY,
}
_HINT: Final = "see tailrace get requests and tailrace get instances"


@click.command(epilog="Example: tailrace migrate chatcmpl-8f3a --to worker-1")
@click.argument("request_id", metavar="REQUEST")
@click.option("--to", "target", required=True, metavar="INSTANCE", help="Target instance.")
@click.option(
    "--mode",
    type=click.Choice(list(_MODES)),
    default="pre-copy",
    show_default=True,
    help="stop-and-copy: no copy rounds while the request runs (for comparison).",
)
@output_option()
@admin_option
def migrate(request_id: str, target: str, mode: str, output: Output, admin: str | None) -> None:
    """Migrate the running REQUEST to another instance, with its KV cache.

    REQUEST is its ID, a unique part of it, or the whole ID that its client chose (X-Request-Id) or got.

    A request that cannot migrate live is replayed: the other instance recomputes the KV.

    Progress goes to stderr; the last line (or the JSON object) has rounds, bytes, and the pause in
    milliseconds and decode steps. Exit code 1 if the migration was aborted: the request then continues
    where it was.
    """
    with connect(admin) as connection, connection.errors(_HINT):
        request = AdminMigrateRequest(
            request_id=request_id,
            target_instance_id=target,
            mode=_MODES[mode],
            reason="operator",
        )
        progress = _Progress()
        for record in connection.stub.Migrate(request, timeout=_TIMEOUT_S):
            progress.show(record)
    _finish(progress.last, output)


class _Progress:
    """Print the progress of a migration: new states, and finished rounds."""

    def __init__(self) -> None:
        self.last: MigrationRecord | None = None
        self._rounds = 0

    def show(self, record: MigrationRecord) -> None:
        """Print what is new in a record."""
        if self.last is None or record.state != self.last.state:
            note(
                f"{migration_word(record.state)}: {record.source_instance_id} -> {record.target_instance_id}"
            )
        for copied in record.rounds[self._rounds :]:
            note(
                f"round {copied.number}: blocks {copied.blocks}, "
                f"{bytes_text(copied.bytes)}, {copied.ms:.1f} ms"
            )
        self._rounds = max(self._rounds, len(record.rounds))
        self.last = record


def _finish(record: MigrationRecord | None, output: Output) -> None:
    if record is None:
        raise CliError("the migration ended without a final record; see the scheduler's log")
    if output is Output.JSON:
        print_json(to_plain(record))
    if record.state == MIGRATION_STATE_ABORTED:
        raise CliError(
            f"aborted: {record.error or record.reason or 'no reason given'}; the request continues "
            "where it was"
        )
    if record.state == MIGRATION_STATE_GONE:
        raise CliError(f"nothing to move: {record.error}")
    if record.state == MIGRATION_STATE_UNKNOWN:
        raise CliError(
            f"its end is unknown: {record.error}; tailrace get requests shows where the request is"
        )
    if record.state != MIGRATION_STATE_COMMITTED:
        raise CliError(
            f"the stream of events ended in state {migration_word(record.state)}; see tailrace get migrations"
        )
    if output is Output.TABLE:
        click.echo(
            f"{record.request_id} is on {record.target_instance_id} (epoch {record.epoch}, "
            f"{phase_word(record.phase)}, {record.tokens} tokens): {copied_text(record)}, "
            f"paused {record.pause_ms:.1f} ms = {record.pause_steps:.1f} decode steps"
        )
