"""Between the messages of the wire and the library's own types."""

from __future__ import annotations

from typing import Final

from tailrace.cluster import InstanceState, Phase, Pool, RequestState, RequestView
from tailrace.predictor.limits import limited, tokens_left
from tailrace.v1 import monitor_pb2, types_pb2

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
    """A pool on the wire; UNSPECIFIED for no pool."""
    return types_pb2.POOL_UNSPECIFIED if pool is None else POOL_NUMBERS[pool]


def predicted_remaining(
    told: monitor_pb2.RequestReport | monitor_pb2.PhaseEvent, max_model_len: int
) -> float | None:
    """The prediction that a worker tells of a request, no more than may come; None: it tells none."""
    if not told.HasField("predicted_remaining_tokens"):
        return None
    left = tokens_left(told.prompt_tokens, told.output_tokens, told.max_tokens, max_model_len)
    return limited(told.predicted_remaining_tokens, left)


def request_view(
    instance_id: str,
    block_tokens: int,
    max_model_len: int,
    report: monitor_pb2.RequestReport,
    migrating: bool,
) -> RequestView:
    """One request as its instance reported it."""
    state = REQUEST_STATES.get(report.state, RequestState.WAITING)
    return RequestView(
        request_id=report.request_id,
        instance_id=instance_id,
        phase=PHASES.get(report.phase, Phase.PREFILL),
        state=state,
        prompt_tokens=report.prompt_tokens,
        output_tokens=report.output_tokens,
        max_tokens=report.max_tokens,
        epoch=report.epoch,
        reasoning_tokens=report.reasoning_tokens,
        kv_tokens=report.kv_blocks * block_tokens,
        host_kv_tokens=report.host_kv_blocks * block_tokens,
        arrival_s=report.arrival_s,
        token_interval_s=report.token_interval_ms / 1e3,
        frontend_id=report.frontend_id,
        migrating=migrating or state is RequestState.PAUSED,
        pacer_slack_tokens=report.pacer_slack_tokens if report.HasField("pacer_slack_tokens") else None,
        predicted_remaining_tokens=predicted_remaining(report, max_model_len),
        phase_tokens=report.phase_tokens,
        demoted=report.demoted,
        qoe=report.qoe if report.HasField("qoe") else None,
    )
