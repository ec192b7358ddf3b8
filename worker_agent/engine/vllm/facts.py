"""Snapshots of the engine for reports, taken on the event loop without locks while the engine thread runs."""

from __future__ import annotations

import time

from torch._dynamo.callback import CallbackArgs, on_compile_end, on_compile_start
from vllm.v1.request import RequestStatus

from worker_agent.engine.base import EngineStats, RequestStats
from worker_agent.engine.vllm.cache_watch import CacheWatch, expected_hit_tokens
from worker_agent.engine.vllm.load import LoadedCore
from worker_agent.engine.vllm.orders import job_view
from worker_agent.engine.vllm.outputs import OutputWriter
from worker_agent.engine.vllm.requests import VllmRequest, VllmRequests


class Compilations:
    """Count torch's compilations in this process from now on. Written by the compiling thread, read by any.

    vLLM compiles some functions when a request first needs them, for log-probabilities for example. The
    engine thread then waits for a C++ or a Triton compiler, on a busy machine for much longer than for any
    step before, and must not be taken for hung.
    """

    def __init__(self) -> None:
        self.finished = 0
        self.running = False
        on_compile_start(self._start)
        on_compile_end(self._end)

    def _start(self, _: CallbackArgs) -> None:
        self.running = True

    def _end(self, _: CallbackArgs) -> None:
        self.finished += 1
        self.running = False


def engine_stats(
    core: LoadedCore,
    table: VllmRequests,
    writer: OutputWriter,
    cache: CacheWatch | None,
    compilations: Compilations,
) -> EngineStats:
    """Return the engine's statistics. `cache` is None if the engine has no prefix cache."""
    entries = list(table)
    mean_ms, p99_ms = writer.intervals.mean_and_p99_ms(time.monotonic())
    backlog = sum(_backlog(core, entry, cache) for entry in entries)
    # vLLM counts a step's tokens as computed when the step begins.
    ahead = min(core.config.scheduler_config.max_num_batched_tokens, backlog + len(entries))
    tier = core.scheduler.tailrace_connector.tier
    return EngineStats(
        requests=[_request_stats(core, entry) for entry in entries],
        kv_blocks_used=core.kv_blocks_used,
        kv_blocks_total=core.kv_blocks_total,
        host_kv_bytes_used=core.host.used * core.host.block_bytes,
        host_kv_bytes_total=core.host.total * core.host.block_bytes,
        swaps_out=core.host.swapped_out,
        swaps_in=core.host.swapped_in,
        swaps_refused=core.host.refused,
        host_kv_corrupt_blocks=0 if core.host_pool is None else core.host_pool.corrupt_blocks,
        prefill_backlog_tokens=backlog,
        # A step in lockstep takes as long as that of the data-parallel rank with the longest.
        expected_step_s=None
        if core.lockstep is not None
        else writer.times.expected_s(max(core.scheduler.scheduled_tokens, ahead)),
        compilations=compilations.finished,
        compiling=compilations.running,
        steps=writer.steps,
        generated_tokens=writer.generated_tokens,
        prompt_tokens=writer.prompt_tokens,
        cached_prompt_tokens=writer.cached_prompt_tokens,
        host_cached_prompt_tokens=writer.loaded_prompt_tokens if tier is not None else 0,
        host_cached_bytes=core.host.cached * core.host.block_bytes,
        host_blocks_stored=core.host.stored,
        host_blocks_loaded=tier.loaded_blocks if tier is not None else 0,
        host_blocks_dropped=core.host.dropped,
        preemptions=core.scheduler.preemptions,
        token_interval_ms_mean=mean_ms,
        token_interval_ms_p99=p99_ms,
    )


def _request_stats(core: LoadedCore, entry: VllmRequest) -> RequestStats:
    request, swapped = entry.request, core.host.get(entry.request_id)
    return RequestStats(
        request_id=entry.request_id,
        frontend_id=entry.frontend_id,
        epoch=entry.epoch,
        phase=entry.phases.phase,
        state=_state(core, entry),
        prompt_tokens=request.num_prompt_tokens,
        output_tokens=entry.emitted,
        reasoning_tokens=entry.phases.reasoning_tokens,
        max_tokens=entry.max_output_tokens(core.max_model_len),
        kv_blocks=-(-request.num_computed_tokens // core.block_tokens),
        kv_on_host=core.host.get(entry.request_id) is not None,
        arrival_s=request.arrival_time,
        token_interval_ms=entry.pace.interval_ms,
        demoted=core.intra is not None and core.intra.demoted(job_view(entry)),
        host_kv_blocks=0 if swapped is None else len(swapped.slots),
        predicted_remaining_tokens=entry.predicted_remaining(core.max_model_len),
    )


def _state(core: LoadedCore, entry: VllmRequest) -> str:
    status = entry.request.status
    if entry.request_id in core.scheduler.paused:
        return "paused"
    if status == RequestStatus.RUNNING:
        return "running"
    if core.host.get(entry.request_id) is not None:
        return "preempted"
    if status == RequestStatus.PREEMPTED and entry.request_id not in core.scheduler.adopted:
        return "preempted"
    return "waiting"


def _backlog(core: LoadedCore, entry: VllmRequest, cache: CacheWatch | None) -> int:
    """Return the tokens to compute before the request's next output token; 0 if it only needs that one."""
    if core.host.get(entry.request_id) is not None:
        return 0
    left: int = entry.request.num_tokens - entry.request.num_computed_tokens
    if cache is not None:
        left -= expected_hit_tokens(entry.request, cache.book, core.block_tokens)
    return left if left > 1 else 0
