"""`tailrace set`: what an operator changes."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from tailrace.cli.admin import CALL_TIMEOUT_S, admin_option, connect
from tailrace.cli.errors import UsageProblem
from tailrace.cli.output import Output, output_option, print_json
from tailrace.cli.plain import JsonValue, enum_word, enum_words
from tailrace.records import StageRecord
from tailrace.v1.admin_pb2 import SetPolicyRequest, SetPoolRequest, SetStagesRequest
from tailrace.v1.types_pb2 import POOL_UNSPECIFIED, Pool, Stage

_NO_POOL = "none"


@click.group(name="set", epilog="Example: tailrace set policy least_loaded")
def set_() -> None:
    """Change policy, pools and stages."""


@set_.command(epilog="Example: tailrace set policy round_robin")
@click.argument("name")
@output_option()
@admin_option
def policy(name: str, output: Output, admin: str | None) -> None:
    """Let the policy NAME decide from now on."""
    with connect(admin) as connection, connection.errors("tailrace get policies lists them"):
        reply = connection.stub.SetPolicy(SetPolicyRequest(name=name), timeout=CALL_TIMEOUT_S)
    _tell(output, {"policy": name, "previous": reply.previous or None})


@set_.command(epilog="Example: tailrace set pool worker-0 prefill")
@click.argument("instance")
@click.argument("pool", type=click.Choice([*enum_words(Pool.DESCRIPTOR), _NO_POOL]))
@output_option()
@admin_option
def pool(instance: str, pool: str, output: Output, admin: str | None) -> None:
    """Put INSTANCE into POOL, or take it out of all with "none"."""
    number = POOL_UNSPECIFIED if pool == _NO_POOL else Pool.ValueType(enum_words(Pool.DESCRIPTOR)[pool])
    with connect(admin) as connection, connection.errors("tailrace get instances lists them"):
        request = SetPoolRequest(instance_id=instance, pool=number)
        reply = connection.stub.SetPool(request, timeout=CALL_TIMEOUT_S)
    previous = enum_word(Pool.DESCRIPTOR, reply.previous)
    _tell(output, {"instance": instance, "pool": None if pool == _NO_POOL else pool, "previous": previous})


@set_.command(
    epilog='Example: echo \'[{"lo": 0, "hi": 8192, "instance_ids": ["worker-0"]}]\' | tailrace set stages -'
)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path))
@output_option()
@admin_option
def stages(file: Path, output: Output, admin: str | None) -> None:
    """Set the length ranges and their instances from a JSON FILE ("-" reads stdin).

    FILE is a list of {"lo": tokens, "hi": tokens, "instance_ids": [..]}; an empty list takes all stages away.
    """
    stages = [_stage(number, record) for number, record in enumerate(_read_stages(file))]
    request = SetStagesRequest(stages=stages)
    with connect(admin) as connection, connection.errors("tailrace get stages shows what holds now"):
        connection.stub.SetStages(request, timeout=CALL_TIMEOUT_S)
    _tell(output, {"stages": len(stages)})


def _read_stages(file: Path) -> list[StageRecord]:
    with click.open_file(str(file), "rb") as stream:
        text = stream.read()
    try:
        return msgspec.json.decode(text, type=list[StageRecord])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageProblem(f"{file}: {error}") from error


def _stage(number: int, record: StageRecord) -> Stage:
    try:
        return Stage(lo=record.lo, hi=record.hi, instance_ids=record.instance_ids)
    except ValueError as error:
        raise UsageProblem(f"stage {number} [{record.lo}, {record.hi}): {error}") from error


def _tell(output: Output, figures: dict[str, JsonValue]) -> None:
    if output is Output.JSON:
        print_json(figures)
        return
    click.echo(", ".join(f"{name}: {'-' if value is None else value}" for name, value in figures.items()))
