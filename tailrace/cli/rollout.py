"""`tailrace rollout`: have another model take a name's new requests, while the fleet serves."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Final

import click
import grpc
from rich.table import Table

from tailrace.brief_help import WholeGroup
from tailrace.cli.admin import CALL_TIMEOUT_S, Admin, admin_option, connect
from tailrace.cli.errors import CliError
from tailrace.cli.output import Output, note, output_option, print_figures, print_json
from tailrace.cli.plain import JsonValue, to_plain, to_plain_list
from tailrace.cli.tables import NOTHING
from tailrace.numeric import Duration, WholeRange
from tailrace.v1.admin_pb2 import (
    ROLLOUT_STATE_DONE,
    ForgetRolloutRequest,
    ListModelsRequest,
    ModelInfo,
    RolloutEvent,
    RolloutInfo,
    RolloutRequest,
    UndoRolloutRequest,
    WatchRolloutRequest,
)

_HINT: Final = "tailrace rollout status shows models and fingerprints"
# A leader that dies is replaced within seconds.
_AGAIN_S: Final = 1.0

_model = click.argument("model")
_prepare = click.option(
    "--prepare-timeout",
    "prepare_s",
    type=Duration(min=1, max=3600),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="If some front end is not connected to a warm new instance by then, nothing is changed.",
)
_timeout = click.option(
    "--timeout",
    "timeout_s",
    type=Duration(min=1),
    default=3600.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for it to finish.",
)


@click.group(cls=WholeGroup, epilog="Example: tailrace rollout start chat --to 9f2c41d07be3")
def rollout() -> None:
    """Roll out new weights of a model, or another precision, while it serves.

    Start workers with the new model next to the old ones. `start` then directs new requests for the model's
    name to them, and drains the old workers one after another. Every answer comes from one of the two models.
    """


@rollout.command(epilog="Example: tailrace rollout start chat --to /models/chat-2")
@_model
@click.option(
    "--to",
    required=True,
    metavar="FINGERPRINT",
    help="The new fingerprint, at least four of its digits, or its workers' --model.",
)
@click.option(
    "--min-warm",
    type=WholeRange(min=1),
    metavar="N",
    help="Number of warm new instances required before new requests go there. Default: half the number of "
    "old ones.",
)
@_prepare
@_timeout
@output_option()
@admin_option
def start(
    model: str,
    to: str,
    min_warm: int | None,
    prepare_s: float,
    timeout_s: float,
    output: Output,
    admin: str | None,
) -> None:
    """Direct new requests for MODEL to another fingerprint; returns when no request of the old one is left.

    Ctrl-C stops the waiting, not the rollout; run the same command again to resume waiting. Old workers that
    are empty can be stopped, or restarted with the new model, at any time.
    """
    request = RolloutRequest(model=model, to=to, prepare_s=prepare_s, min_warm=min_warm or 0)
    with connect(admin) as connection:
        with connection.errors(_HINT):
            begun = connection.stub.Rollout(request, timeout=CALL_TIMEOUT_S)
        _warn(model, begun)
        _wait(connection, model, begun, timeout_s, output)


@rollout.command(epilog="Example: tailrace rollout undo chat")
@_model
@_prepare
@_timeout
@output_option()
@admin_option
def undo(model: str, prepare_s: float, timeout_s: float, output: Output, admin: str | None) -> None:
    """Direct new requests for MODEL back to the previous fingerprint, and drain the other workers.

    The new model finishes the answers that it has begun. A rollout that is still preparing is abandoned.
    """
    request = UndoRolloutRequest(model=model, prepare_s=prepare_s)
    with connect(admin) as connection:
        with connection.errors(_HINT):
            begun = connection.stub.UndoRollout(request, timeout=CALL_TIMEOUT_S)
        if begun.reason:
            _tell(model, begun, output)
        else:
            _warn(model, begun)
            _wait(connection, model, begun, timeout_s, output)


@rollout.command(epilog="Example: tailrace rollout status")
@click.argument("model", required=False)
@output_option()
@admin_option
def status(model: str | None, output: Output, admin: str | None) -> None:
    """Show models by name and fingerprint, which one takes new requests, and the progress of rollouts."""
    with connect(admin) as connection, connection.errors():
        listed = connection.stub.ListModels(ListModelsRequest(), timeout=CALL_TIMEOUT_S).models
    models = [listed_model for listed_model in listed if model in (None, listed_model.name)]
    if model is not None and not models:
        names = ", ".join(listed_model.name for listed_model in listed) or "none"
        raise CliError(f"no front end serves {model!r}; they serve: {names}")
    if output is Output.JSON:
        print_json({"models": [_plain(listed_model) for listed_model in models]})
        return
    print_figures(_table(models))
    for listed_model in models:
        if listed_model.HasField("rollout"):
            click.echo(f"{listed_model.name}: {listed_model.rollout.message}")


@rollout.command(epilog="Example: tailrace rollout forget chat")
@_model
@output_option()
@admin_option
def forget(model: str, output: Output, admin: str | None) -> None:
    """Remove the record of MODEL's last rollout: front ends use their own --model again.

    Refused while a rollout is in progress, and until every front end has been restarted with the model that
    takes new requests.
    """
    with connect(admin) as connection, connection.errors(_HINT):
        connection.stub.ForgetRollout(ForgetRolloutRequest(model=model), timeout=CALL_TIMEOUT_S)
    if output is Output.JSON:
        print_json({"model": model, "forgotten": True})
    else:
        click.echo(f"{model}: front ends use their own --model")


def _warn(model: str, begun: RolloutInfo) -> None:
    if begun.warning:
        note(f"{model}: warning: {begun.warning}")


def _wait(connection: Admin, model: str, begun: RolloutInfo, timeout_s: float, output: Output) -> None:
    """Print the rollout's progress until it is over. Raise CliError if it fails or exceeds the timeout."""
    last = begun
    for event in _events(connection, model, begun, timeout_s):
        last = event.rollout
        if not event.done:
            note(f"{model}: {last.message}")
        if event.done and (last.state == ROLLOUT_STATE_DONE or output is Output.JSON):
            _tell(model, last, output)
        if event.done and last.state != ROLLOUT_STATE_DONE:
            raise CliError(f"{model}: {last.message}")
        if event.done:
            return
    raise CliError(
        f"{model}: not finished after {timeout_s:g} s, it continues ({last.message}); "
        f"tailrace rollout status {model}"
    )


def _events(connection: Admin, model: str, begun: RolloutInfo, timeout_s: float) -> Iterator[RolloutEvent]:
    """Yield the rollout's events until it is over or the time is up; reconnect if a scheduler is lost."""
    request = WatchRolloutRequest(model=model, begun_s=begun.begun_s)
    until_s = time.monotonic() + timeout_s
    while (left_s := until_s - time.monotonic()) > 0:
        try:
            with connection.errors(_HINT):
                yield from connection.stub.WatchRollout(request, timeout=left_s)
                return
        except CliError as error:
            cause = error.__cause__
            code = cause.code() if isinstance(cause, grpc.Call) else None
            if code is grpc.StatusCode.DEADLINE_EXCEEDED:
                return
            if code is not grpc.StatusCode.UNAVAILABLE:
                raise
            note(f"{model}: {error.message}; retrying")
            time.sleep(min(_AGAIN_S, max(0.0, until_s - time.monotonic())))


def _tell(model: str, rollout: RolloutInfo, output: Output) -> None:
    if output is Output.JSON:
        print_json({"model": model, "rollout": to_plain(rollout)})
    else:
        click.echo(f"{model}: {rollout.message}")


def _plain(model: ModelInfo) -> dict[str, JsonValue]:
    return {
        **to_plain(model),
        "versions": to_plain_list(model.versions),
        "rollout": to_plain(model.rollout) if model.HasField("rollout") else None,
    }


def _table(models: Sequence[ModelInfo]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("MODEL", "FINGERPRINT", "NEW REQUESTS", "INSTANCES"):
        table.add_column(heading, no_wrap=True)
    for heading in ("WARM", "REQUESTS"):
        table.add_column(heading, justify="right")
    table.add_column("PATH", no_wrap=True)
    for model in models:
        for version in model.versions:
            table.add_row(
                model.name,
                version.fingerprint,
                "yes" if version.takes_new else NOTHING,
                ", ".join(version.instance_ids),
                str(version.warm),
                str(version.requests),
                ", ".join(version.paths),
            )
        if not model.versions:
            table.add_row(model.name, NOTHING, NOTHING, NOTHING, "0", "0", NOTHING)
    if not models:
        table.caption = "no front end serves a model"
        table.caption_justify = "left"
    return table
