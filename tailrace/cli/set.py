"""`tailrace set`: change the cluster's settings."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

import click
import msgspec

from tailrace.bounded import read_regular
from tailrace.brief_help import WholeGroup
from tailrace.cli.admin import CALL_TIMEOUT_S, admin_option, connect
from tailrace.cli.errors import UsageProblem
from tailrace.cli.output import Output, note, output_option, print_json
from tailrace.cli.plain import JsonValue, enum_word, enum_words
from tailrace.durations import with_unit
from tailrace.messages import objectives_message, slo_of
from tailrace.policy.parameters import ParameterError, read_assignments
from tailrace.records import StageRecord
from tailrace.slo import assignments, read_objectives
from tailrace.v1.admin_pb2 import (
    SetPolicyRequest,
    SetPoolRequest,
    SetShadowRequest,
    SetSloRequest,
    SetStagesRequest,
)
from tailrace.v1.types_pb2 import POOL_UNSPECIFIED, Pool, Stage

_NO_POOL = "none"
# Far more than the stages of any fleet.
_STAGES_BYTES = 1 << 20
_NO_SHADOW = "none"
# Nobody waits for a token as long as this.
_SLOW_S = 5.0


@click.group(cls=WholeGroup, name="set", epilog="Example: tailrace set policy least_loaded")
def set_() -> None:
    """Change policy, shadow policy, SLOs, pools and stages."""


_set_option = click.option(
    "--set", "more", multiple=True, metavar="KEY=VALUE", help="A parameter, as tailrace up has it."
)


@set_.command(epilog="Example: tailrace set policy pascal quantum_tokens=250")
@click.argument("name")
@click.argument("parameters", nargs=-1, metavar="[KEY=VALUE]...")
@_set_option
@output_option()
@admin_option
def policy(
    name: str, parameters: tuple[str, ...], more: tuple[str, ...], output: Output, admin: str | None
) -> None:
    """Activate the policy NAME, or NAME+ORDER with a batch order other than its own.

    Parameters that you omit revert to their defaults; tailrace get policies -o json lists them all.
    """
    assignments = _assignments((*parameters, *more))
    with connect(admin) as connection, connection.errors("tailrace get policies lists them"):
        request = SetPolicyRequest(name=name, parameters=assignments)
        reply = connection.stub.SetPolicy(request, timeout=CALL_TIMEOUT_S)
    previous = dict(reply.previous_parameters)
    if output is Output.JSON:
        print_json(
            {
                "policy": name,
                "parameters": {**assignments},
                "previous": reply.previous or None,
                "previous_parameters": {**previous},
            }
        )
        return
    click.echo(
        f"policy: {policy_text(name, assignments)}, previous: {policy_text(reply.previous or '-', previous)}"
    )


@set_.command(epilog="Example: tailrace set shadow pascal")
@click.argument("name")
@click.argument("parameters", nargs=-1, metavar="[KEY=VALUE]...")
@_set_option
@output_option()
@admin_option
def shadow(
    name: str, parameters: tuple[str, ...], more: tuple[str, ...], output: Output, admin: str | None
) -> None:
    """Run the policy NAME alongside the active one and count where its decisions differ; "none" ends it.

    tailrace get shadow shows the counts. The shadow policy lasts until another scheduler leads.
    """
    assignments = _assignments((*parameters, *more))
    policy_name = "" if name == _NO_SHADOW else name
    with connect(admin) as connection, connection.errors("tailrace get policies lists them"):
        request = SetShadowRequest(name=policy_name, parameters=assignments)
        reply = connection.stub.SetShadow(request, timeout=CALL_TIMEOUT_S)
    _print_change(output, {"shadow": policy_name or None, "previous": reply.previous or None})


@set_.command(epilog="Example: tailrace set slo ttft=2s tpot=150ms qoe=0.95")
@click.argument("objectives", nargs=-1, required=True, metavar="KEY=VALUE...")
@output_option()
@admin_option
def slo(objectives: tuple[str, ...], output: Output, admin: str | None) -> None:
    """Set the deployment's service-level objectives, which every policy plans for.

    \b
    ttft  seconds to the first answering token; a request that reasons gets tpot more for each reasoning token
    tpot  seconds between answering tokens, on average
    qoe   minimum QoE of an answer, from 0 to 1
    pace  seconds per token at which users read, for QoE; by default 0.1, or tpot if that is less
    admit refuse a request whose predicted TTFT exceeds this multiple of ttft; off by default

    Times may have a unit: 2s, 150ms. 0 disables an objective. Omitted ones keep their value.
    """
    try:
        given = read_objectives(_assignments(objectives))
    except ParameterError as error:
        raise UsageProblem(str(error)) from error
    with connect(admin) as connection, connection.errors("tailrace get slo shows what holds now"):
        reply = connection.stub.SetSlo(SetSloRequest(slo=objectives_message(given)), timeout=CALL_TIMEOUT_S)
    if output is Output.JSON:
        print_json({"slo": asdict(slo_of(reply.slo)), "previous": asdict(slo_of(reply.previous))})
        return
    for name in ("tpot", "pace"):
        if given.get(name, 0.0) >= _SLOW_S:
            note(f"{name} is {with_unit(given[name])} for each token; milliseconds are written {name}=150ms")
    click.echo(f"slo: {assignments(slo_of(reply.slo))}, previous: {assignments(slo_of(reply.previous))}")


@set_.command(epilog="Example: tailrace set pool worker-0 prefill")
@click.argument("instance")
@click.argument("pool", type=click.Choice([*enum_words(Pool.DESCRIPTOR), _NO_POOL]))
@output_option()
@admin_option
def pool(instance: str, pool: str, output: Output, admin: str | None) -> None:
    """Put INSTANCE into POOL, or remove it from its pool with "none"."""
    number = POOL_UNSPECIFIED if pool == _NO_POOL else Pool.ValueType(enum_words(Pool.DESCRIPTOR)[pool])
    with connect(admin) as connection, connection.errors("tailrace get instances lists them"):
        request = SetPoolRequest(instance_id=instance, pool=number)
        reply = connection.stub.SetPool(request, timeout=CALL_TIMEOUT_S)
    previous = enum_word(Pool.DESCRIPTOR, reply.previous)
    _print_change(
        output, {"instance": instance, "pool": None if pool == _NO_POOL else pool, "previous": previous}
    )


@set_.command(
    epilog='Example: echo \'[{"lo": 0, "hi": 8192, "instance_ids": ["worker-0"]}]\' | tailrace set stages -'
)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path))
@output_option()
@admin_option
def stages(file: Path, output: Output, admin: str | None) -> None:
    """Set the length ranges and their instances from a JSON FILE ("-" reads stdin).

    FILE is a list of {"lo": tokens, "hi": tokens, "instance_ids": [..]}; an empty list removes all stages.
    """
    stages = [_stage(number, record) for number, record in enumerate(_read_stages(file))]
    request = SetStagesRequest(stages=stages)
    with connect(admin) as connection, connection.errors("tailrace get stages shows what holds now"):
        connection.stub.SetStages(request, timeout=CALL_TIMEOUT_S)
    _print_change(output, {"stages": len(stages)})


def _read_stages(file: Path) -> list[StageRecord]:
    try:
        text = sys.stdin.buffer.read(_STAGES_BYTES) if str(file) == "-" else read_regular(file, _STAGES_BYTES)
    except OSError as error:
        raise UsageProblem(f"{file}: {error.strerror}") from error
    try:
        return msgspec.convert(msgspec.json.decode(text), type=list[StageRecord])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UsageProblem(f"{file}: {str(error).replace('$', 'stages')}") from error


def _stage(number: int, record: StageRecord) -> Stage:
    try:
        return Stage(lo=record.lo, hi=record.hi, instance_ids=record.instance_ids)
    except ValueError as error:
        raise UsageProblem(f"stage {number} [{record.lo}, {record.hi}): {error}") from error


def _assignments(texts: Iterable[str]) -> dict[str, str]:
    try:
        return read_assignments(texts)
    except ParameterError as error:
        raise UsageProblem(str(error)) from error


def policy_text(policy: str, parameters: Mapping[str, str]) -> str:
    """Return a policy with the parameters that are given, as `tailrace set policy` takes them."""
    return " ".join([policy, *(f"{name}={value}" for name, value in sorted(parameters.items()))])


def _print_change(output: Output, figures: dict[str, JsonValue]) -> None:
    if output is Output.JSON:
        print_json(figures)
        return
    click.echo(", ".join(f"{name}: {'-' if value is None else value}" for name, value in figures.items()))
