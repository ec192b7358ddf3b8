"""The engine's numbers without what the probes add to them: they are nobody's load."""

from __future__ import annotations

from dataclasses import replace

from worker_agent.engine.base import EnginePhase, EngineStats
from worker_agent.profiling.probes import NAME, Probes


def own_stats(stats: EngineStats, probes: Probes) -> EngineStats:
    """As if nothing were being measured. Prefix caching and preemptions that probes cause stay."""
    if not probes.generated_tokens and not len(probes):
        return stats
    users = [request for request in stats.requests if request.frontend_id != NAME]
    ours = [request for request in stats.requests if request.frontend_id == NAME]
    backlog = sum(request.prompt_tokens for request in ours if request.phase is EnginePhase.PREFILL)
    return replace(
        stats,
        requests=users,
        kv_blocks_used=max(0, stats.kv_blocks_used - sum(request.kv_blocks for request in ours)),
        prefill_backlog_tokens=max(0, stats.prefill_backlog_tokens - backlog),
        generated_tokens=max(0, stats.generated_tokens - probes.generated_tokens),
        token_interval_ms_mean=0.0 if ours and not users else stats.token_interval_ms_mean,
        token_interval_ms_p99=0.0 if ours and not users else stats.token_interval_ms_p99,
    )
