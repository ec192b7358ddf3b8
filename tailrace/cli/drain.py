"""`tailrace drain`: empty an instance, or return it to service."""

from __future__ import annotations

from typing import Final

import click
import grpc

from tailrace.cli.admin import admin_option, connect
from tailrace.cli.errors import CliError
from tailrace.cli.output import Output, note, output_option, print_json
from tailrace.numeric import Duration
from tailrace.v1.admin_pb2 import DrainEvent, DrainRequest


@click.command(epilog="Example: tailrace drain worker-2")
@click.argument("instance")
@click.option("--undrain", is_flag=True, help="Undrain it instead.")
@click.option(
    "--timeout",
    "timeout_s",
    type=Duration(min=1),
    default=600.0,
    show_default=True,
    help="Seconds to wait.",
)
@output_option()
@admin_option
def drain(instance: str, undrain: bool, timeout_s: float, output: Output, admin: str | None) -> None:
    """Stop placing requests on INSTANCE and hand over its requests; returns when it is empty.

    Ctrl-C and --timeout stop the waiting, not the drain.
    """
    request = DrainRequest(instance_id=instance, undrain=undrain)
    last: DrainEvent | None = None
    with connect(admin) as connection, connection.errors(_HINT):
        try:
            for event in connection.stub.Drain(request, timeout=timeout_s):
                note(event.message or f"{instance}: {event.remaining} requests left")
                last = event
        except KeyboardInterrupt:
            raise CliError(
                "interrupted; the drain continues, and the same command waits for it again"
            ) from None
        except grpc.RpcError as error:
            expired = isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            if last is None or not expired:
                raise
            raise CliError(
                f"{instance}: not empty after {timeout_s:g} s ({last.remaining} requests left); the drain "
                "continues, and the same command waits for it again"
            ) from error
    if last is None or not last.done:
        raise CliError(f"{instance}: the event stream ended before it was empty; the drain continues")
    if output is Output.JSON:
        print_json(
            {"instance": instance, "draining": not undrain, "remaining": last.remaining, "done": last.done}
        )
    else:
        click.echo(
            f"{instance} takes new requests again" if undrain else f"{instance} is empty and gets nothing new"
        )


_HINT: Final = "tailrace get instances lists them"
