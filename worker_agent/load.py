"""Convert the engine's statistics to load reports for the monitor, and to what front ends show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tailrace.cluster import Phase
from tailrace.messages import PHASE_NUMBERS, REQUEST_STATE_NUMBERS
from tailrace.perf.horizon import FutureLoad
from tailrace.perf.remaining import tokens_left
from tailrace.telemetry.incidents import guarded
from tailrace.v1 import monitor_pb2, worker_pb2
from worker_agent.engine.base import EngineStats, RequestStats
from worker_agent.progress import StepProgress
from worker_agent.running_requests import RunningRequest
from worker_agent.speeds import Speeds

STATES: Final = {state.value: number for state, number in REQUEST_STATE_NUMBERS.items()}
"""States of requests, by the engine's names of them."""

_future_load: Final = FutureLoad()
# States of requests that take part in no step; a paused one is about to leave the engine, or to go on.
_WAITING: Final = frozenset({"waiting", "preempted"})


@dataclass(frozen=True, slots=True)
class MigrationLoad:
    """Open migrations of an instance, and the recent rate of incoming KV (None: none yet)."""

    incoming: int
    outgoing: int
    bytes_per_s: float | None


def load_of(
    stats: EngineStats, block_tokens: int, migrations: MigrationLoad, speeds: Speeds | None
) -> monitor_pb2.InstanceLoad:
    """Return the load of the instance as a whole. Preempted requests count as waiting."""
    states = Counter(request.state for request in stats.requests)
    phases = Counter(request.phase for request in stats.requests)
    figures: dict[str, float | None] = {
        "running": states["running"],
        "waiting": states["waiting"] + states["preempted"],
        "paused": states["paused"],
        "prefilling": phases[Phase.PREFILL],
        "reasoning": phases[Phase.REASONING],
        "answering": phases[Phase.ANSWERING],
        "kv_blocks_used": stats.kv_blocks_used,
        "kv_blocks_total": stats.kv_blocks_total,
        "block_tokens": block_tokens,
        "host_kv_bytes_used": stats.host_kv_bytes_used,
        "host_kv_bytes_total": stats.host_kv_bytes_total,
        "prefill_backlog_tokens": stats.prefill_backlog_tokens,
        "context_tokens": sum(request.prompt_tokens + request.output_tokens for request in stats.requests),
        "token_interval_ms_mean": stats.token_interval_ms_mean,
        "token_interval_ms_p99": stats.token_interval_ms_p99,
        "steps": stats.steps,
        "generated_tokens": stats.generated_tokens,
        "prompt_tokens": stats.prompt_tokens,
        "cached_prompt_tokens": stats.cached_prompt_tokens,
        "preemptions": stats.preemptions,
        "swaps_out": stats.swaps_out,
        "swaps_in": stats.swaps_in,
        "swaps_refused": stats.swaps_refused,
        "migrations_in": migrations.incoming,
        "migrations_out": migrations.outgoing,
        "migration_bytes_per_s": migrations.bytes_per_s,
    }
    load = monitor_pb2.InstanceLoad()
    for name, figure in figures.items():
        if figure is not None:
            # A figure that is out of range, by a mistake in an engine, must not hide the others.
            with guarded("reports", name):
                setattr(load, name, figure)
    with guarded("reports", "future_load"):
        running = [(r.prompt_tokens + r.output_tokens, _remaining(r)) for r in stats.requests]
        load.future_load.extend(_future_load(running))
    if speeds is not None:
        with guarded("reports", "profiled load"):
            _add_profiled(load, stats, speeds)
    return load


def _remaining(request: RequestStats) -> float:
    """Return the predicted remaining tokens, or without a prediction the most that the request may still
    make."""
    predicted = request.predicted_remaining_tokens
    remaining = tokens_left(request.prompt_tokens, request.output_tokens, request.max_tokens)
    return remaining if predicted is None else predicted


def _add_profiled(load: monitor_pb2.InstanceLoad, stats: EngineStats, speeds: Speeds) -> None:
    """Add Arrow's two quantities (section 5.3), and the coefficients of what another prompt adds to the
    first."""
    prefilling = (request for request in stats.requests if request.phase is Phase.PREFILL)
    prompts = [request.prompt_tokens + request.output_tokens for request in prefilling]
    load.prefill_delay_s = speeds.prefill_delay_s(stats.prefill_backlog_tokens, prompts)
    load.prefill_base_s = speeds.ttft.base_s
    load.prefill_s_per_token = speeds.ttft.per_token_s
    load.prefill_s_per_token_squared = speeds.ttft.per_token_squared_s
    load.max_running_tokens = speeds.max_running_tokens


class Heartbeats:
    """Heartbeats that tell each front end of the engine's steps, and what its metrics show of the engine."""

    def __init__(self, progress: StepProgress, stats: Callable[[], EngineStats]) -> None:
        self._progress = progress
        self._stats = stats

    def __call__(self) -> Callable[[str], worker_pb2.Heartbeat]:
        """Look at the engine once; return the heartbeat for each front end, by its id.

        Whatever fails in that, the heartbeat goes out: front ends live by it, and only show what it says.
        """
        steps, running = self._progress.steps, self._progress.running
        with guarded("heartbeats", "engine state"):
            stats = self._stats()
            waiting = Counter(r.frontend_id for r in stats.requests if r.state in _WAITING)
            kv_usage = stats.kv_blocks_used / max(1, stats.kv_blocks_total)
            # Both are checked here, where a value out of range costs no heartbeat.
            worker_pb2.EngineState(waiting=max(waiting.values(), default=0), kv_usage=kv_usage)
            return lambda frontend_id: worker_pb2.Heartbeat(
                steps=steps,
                running=running,
                engine=worker_pb2.EngineState(waiting=waiting[frontend_id], kv_usage=kv_usage),
            )
        return lambda _: worker_pb2.Heartbeat(steps=steps, running=running)


def request_report(
    request: RequestStats, running: RunningRequest | None, now_s: float
) -> monitor_pb2.RequestReport:
    """Return the report of one request; `now_s`: monotonic. `running` is None for a request that is just
    leaving."""
    slack: float | None = None
    qoe: float | None = None
    if running is not None and running.pace.begun:
        running.pace.count(request.output_tokens, now_s)
        slack, qoe = running.pace.slack_tokens(now_s), running.pace.qoe
    return monitor_pb2.RequestReport(
        request_id=request.request_id,
        frontend_id=request.frontend_id,
        epoch=request.epoch,
        phase=PHASE_NUMBERS[request.phase],
        state=STATES[request.state],
        prompt_tokens=request.prompt_tokens,
        output_tokens=request.output_tokens,
        reasoning_tokens=request.reasoning_tokens,
        max_tokens=request.max_tokens,
        kv_blocks=request.kv_blocks,
        host_kv_blocks=request.host_kv_blocks,
        arrival_s=request.arrival_s,
        token_interval_ms=request.token_interval_ms,
        phase_tokens=request.phase_tokens,
        demoted=request.demoted,
        predicted_remaining_tokens=request.predicted_remaining_tokens,
        pacer_slack_tokens=slack,
        qoe=qoe,
        traceparent="" if running is None else running.traceparent,
    )
