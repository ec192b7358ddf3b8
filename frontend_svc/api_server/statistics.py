"""vLLM's own statistics (`vllm:...`, and its log line) of an API server over a fleet.

`frontend_svc` tells how many requests run and wait, and how full the KV is (frontend_svc/observer.py);
workers tell when a request was queued, scheduled and preempted. The rest is made here: what an engine core
would count but no message carries, and times by this process's clock, since a request's outputs may come from
several machines.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, Final

from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestState
from vllm.v1.metrics.loggers import PrometheusStatLogger, StatLoggerManager
from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, PrefixCacheStats, SchedulerStats

from tailrace.telemetry.incidents import loop_failed

_PREEMPTED: Final = EngineCoreEventType.PREEMPTED


def correct_times(state: RequestState, output: EngineCoreOutput, engine_s: float, now_s: float) -> None:
    """Put an output's events on this process's clock, which reads `now_s` where the worker's read `engine_s`;
    what is scheduled anew after a loss or a migration counts from the first time. Whatever a worker says, an
    event is not before the request nor after its output."""
    stats = state.stats
    if stats is not None and output.events:
        arrived_s = now_s - (time.time() - stats.arrival_time)
        again = stats.scheduled_ts > 0.0
        output.events = [event for event in output.events if not again or event.type == _PREEMPTED]
        for event in output.events:
            # In this order, NaN becomes the arrival.
            event.timestamp = min(now_s, max(arrived_s, event.timestamp + now_s - engine_s))


def count_untold_waits(processor: OutputProcessor) -> None:
    """Have all waiting counted as prefill for requests whose engine did not tell when it scheduled them."""
    update = processor._update_stats_from_finished

    # A stop string ends a request here, without a last output of the engine.
    def updated(state: RequestState, *arguments: Any, **named_arguments: Any) -> None:
        stats = state.stats
        if stats is not None and 0.0 in (stats.queued_ts, stats.scheduled_ts):
            arrived_s = time.monotonic() - (time.time() - stats.arrival_time)
            stats.queued_ts = stats.scheduled_ts = arrived_s
        update(state, *arguments, **named_arguments)

    processor._update_stats_from_finished = updated


def count_prefix_hits(manager: StatLoggerManager) -> None:
    """Have the prompts' tokens, and those of them found in an instance's prefix cache, counted as an engine
    core's.

    vLLM's loop over outputs ends with what fails here, such as a count below zero from a worker: it goes on.
    """
    record = manager.record
    last = SchedulerStats()

    def recorded(
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int | None = None,
    ) -> None:
        nonlocal last
        try:
            if scheduler_stats is not None:
                last = scheduler_stats
            if iteration_stats is not None and iteration_stats.prompt_token_stats.total:
                prompts = iteration_stats.prompt_token_stats
                found = PrefixCacheStats(
                    requests=len(iteration_stats.time_to_first_tokens_iter),
                    queries=prompts.total,
                    hits=prompts.local_cache_hit,
                )
                scheduler_stats = replace(last, prefix_cache_stats=found)
            record(scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)
        except Exception as error:  # noqa: BLE001 - see above
            loop_failed("statistics", "", error)

    manager.record = recorded


def count_aborts(processor: OutputProcessor, manager: StatLoggerManager) -> None:
    """Have requests whose clients left counted as finished with the reason "abort"."""
    abort_requests = processor.abort_requests
    loggers = [one for one in manager.stat_loggers if isinstance(one, PrometheusStatLogger)]
    counters = [one.counter_request_success[FinishReason.ABORT][0] for one in loggers]
    nested = False

    def abort(*arguments: Any, **named_arguments: Any) -> list[str]:
        nonlocal nested
        if nested:
            # The answers of one request with several, by the call for that request.
            found: list[str] = abort_requests(*arguments, **named_arguments)
            return found
        nested = True
        try:
            aborted: list[str] = abort_requests(*arguments, **named_arguments)
        finally:
            nested = False
        for counter in counters:
            counter.inc(len(aborted))
        return aborted

    processor.abort_requests = abort
