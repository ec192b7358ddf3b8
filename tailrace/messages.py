"""Convert between the library's types and protobuf messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Final

from tailrace.cluster import InstanceState, Phase, Pool, RequestState, RequestView
from tailrace.handover import TransferMode
from tailrace.perf.remaining import limited, tokens_left
from tailrace.records import ProfileRecord
from tailrace.request_columns import optional_of, value_of
from tailrace.slo import FIELDS, Slo
from tailrace.v1 import admin_pb2, monitor_pb2, profile_pb2, types_pb2

PHASES: Final = {
    types_pb2.PHASE_PREFILL: Phase.PREFILL,
    types_pb2.PHASE_REASONING: Phase.REASONING,
    types_pb2.PHASE_ANSWERING: Phase.ANSWERING,
}
PHASE_NUMBERS: Final = {phase: number for number, phase in PHASES.items()}

REQUEST_STATES: Final = {
    types_pb2.REQUEST_STATE_WAITING: RequestState.WAITING,
    types_pb2.REQUEST_STATE_RUNNING: RequestState.RUNNING,
    types_pb2.REQUEST_STATE_PAUSED: RequestState.PAUSED,
    types_pb2.REQUEST_STATE_PREEMPTED: RequestState.PREEMPTED,
}
REQUEST_STATE_NUMBERS: Final = {state: number for number, state in REQUEST_STATES.items()}

POOLS: Final = {
    types_pb2.POOL_PREFILL: Pool.PREFILL,
    types_pb2.POOL_DECODE: Pool.DECODE,
    types_pb2.POOL_PREFILL_TO_DECODE: Pool.PREFILL_TO_DECODE,
    types_pb2.POOL_DECODE_TO_PREFILL: Pool.DECODE_TO_PREFILL,
}
POOL_NUMBERS: Final = {pool: number for number, pool in POOLS.items()}

INSTANCE_STATE_NUMBERS: Final = {
    InstanceState.ACTIVE: types_pb2.INSTANCE_STATE_ACTIVE,
    InstanceState.DRAINING: types_pb2.INSTANCE_STATE_DRAINING,
    InstanceState.SUSPECT: types_pb2.INSTANCE_STATE_SUSPECT,
}


def pool_number(pool: Pool | None) -> types_pb2.Pool.ValueType:
    """Return the protobuf value of a pool; UNSPECIFIED for no pool."""
    return types_pb2.POOL_UNSPECIFIED if pool is None else POOL_NUMBERS[pool]


def predicted_remaining(event: monitor_pb2.PhaseEvent, max_model_len: int) -> float | None:
    """Return a worker's prediction for a request, capped by what may still come; None if there is none."""
    if not event.HasField("predicted_remaining_tokens"):
        return None
    left = tokens_left(event.prompt_tokens, event.output_tokens, event.max_tokens, max_model_len)
    return limited(event.predicted_remaining_tokens, left)


def request_view(
    instance_id: str,
    block_tokens: int,
    max_model_len: int,
    columns: monitor_pb2.RequestColumns,
    row: int,
) -> RequestView:
    """Return a request as its instance reported it, without migrations open to the scheduler."""
    unknown = types_pb2.REQUEST_STATE_UNSPECIFIED
    state = REQUEST_STATES.get(value_of(columns.states, row, unknown), RequestState.WAITING)
    prompt_tokens = value_of(columns.prompt_tokens, row, 0)
    output_tokens = value_of(columns.output_tokens, row, 0)
    max_tokens = value_of(columns.max_tokens, row, 0)
    predicted = optional_of(columns.predicted_remaining_tokens, row)
    if predicted is not None:
        left = tokens_left(prompt_tokens, output_tokens, max_tokens, max_model_len)
        predicted = limited(predicted, left)
    return RequestView(
        request_id=columns.request_ids[row],
        instance_id=instance_id,
        phase=PHASES.get(value_of(columns.phases, row, types_pb2.PHASE_UNSPECIFIED), Phase.PREFILL),
        state=state,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        max_tokens=max_tokens,
        epoch=value_of(columns.epochs, row, 0),
        reasoning_tokens=value_of(columns.reasoning_tokens, row, 0),
        kv_tokens=value_of(columns.kv_blocks, row, 0) * block_tokens,
        host_kv_tokens=value_of(columns.host_kv_blocks, row, 0) * block_tokens,
        arrival_s=value_of(columns.arrival_s, row, 0.0),
        token_interval_s=value_of(columns.token_interval_ms, row, 0.0) / 1e3,
        frontend_id=value_of(columns.frontend_ids, value_of(columns.frontends, row, 0), ""),
        migrating=state is RequestState.PAUSED,
        pacer_slack_tokens=optional_of(columns.pacer_slack_tokens, row),
        predicted_remaining_tokens=predicted,
        phase_tokens=value_of(columns.phase_tokens, row, 0),
        demoted=value_of(columns.demoted, row, False),
        qoe=optional_of(columns.qoe, row),
    )


TRANSFER_MODES: Final = {
    TransferMode.LIVE: types_pb2.WAY_LIVE,
    TransferMode.REPLAY: types_pb2.WAY_REPLAY,
    TransferMode.STAYS: types_pb2.WAY_STAYS,
}


def slo_message(slo: Slo) -> admin_pb2.Slo:
    """Return the message for `slo`, without objectives that are not set."""
    return admin_pb2.Slo(**asdict(slo))


def slo_of(message: admin_pb2.Slo) -> Slo:
    """Return the SLO of a message."""
    given = given_objectives(message)
    return Slo(**{field: given.get(name) for name, field in FIELDS.items()})


def objectives_message(objectives: Mapping[str, float]) -> admin_pb2.Slo:
    """Return the message of some objectives, by the names of `tailrace.slo.OBJECTIVES`."""
    return admin_pb2.Slo(**{FIELDS[name]: value for name, value in objectives.items()})


def given_objectives(message: admin_pb2.Slo) -> dict[str, float]:
    """Return the objectives of a message, by the names of `tailrace.slo.OBJECTIVES`."""
    given = {field.name: value for field, value in message.ListFields()}
    return {name: given[field] for name, field in FIELDS.items() if field in given}


def profile_message(record: ProfileRecord) -> profile_pb2.MeasuredProfile:
    """Return a profile record as a message."""
    profile, curve, qoe = record.profile, record.ttft, record.qoe
    return profile_pb2.MeasuredProfile(
        kind=record.kind,
        engine=record.engine,
        model=record.model,
        hardware=record.hardware,
        version=record.version,
        instance_id=record.instance_id,
        measured_s=record.measured_s,
        took_s=record.took_s,
        prefill=profile_pb2.PrefillFit(
            base_ms=profile.prefill.base_ms,
            ms_per_token=profile.prefill.ms_per_token,
            ms_per_token_squared=profile.prefill.ms_per_token_squared,
            error=record.prefill_error,
            samples=record.prefill_samples,
        ),
        decode=profile_pb2.DecodeFit(
            base_ms=profile.decode.base_ms,
            ms_per_request=profile.decode.ms_per_request,
            ms_per_kv_token=profile.decode.ms_per_kv_token,
            error=record.decode_error,
            samples=record.decode_samples,
        ),
        ttft=profile_pb2.TtftFit(
            base_s=curve.base_s,
            s_per_token=curve.per_token_s,
            s_per_token_squared=curve.per_token_squared_s,
            r_squared=curve.r_squared,
            samples=curve.samples,
        ),
        kv_bytes_per_token=profile.kv_bytes_per_token,
        kv_capacity_tokens=profile.kv_capacity_tokens,
        tpot_s=record.tpot_s,
        max_running_tokens=record.max_running_tokens,
        qoe=None if qoe is None else profile_pb2.QoeFit(d=qoe.d, error=qoe.error, samples=qoe.samples),
    )
