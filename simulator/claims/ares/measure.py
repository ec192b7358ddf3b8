"""One run of ARES's cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from simulator.claims.ares.cluster import ARMS, cluster, prefill_instances
from simulator.claims.ares.timed import TimedAres
from simulator.claims.base import Figures
from simulator.claims.saturation import saturation_rate
from simulator.records import MigrationOutcome
from simulator.run import simulate
from simulator.workloads.arrivals import poisson_requests
from simulator.workloads.generators import GENERATORS
from tailrace.intra.fcfs import Fcfs

# TPOT that a request must keep to count as good; the paper names none. Twice the decode step at half-full KV
# (section 5.3: 18.23 ms).
TPOT_SLO_S: Final = 2 * 0.01823
# Share of the time that is left out of averages over time: the cluster fills.
_RAMP: Final = 0.25
_SAMPLED: Final = 20_000


def rate_at(dataset: str, instances: int, load: float) -> float:
    """Requests a second at `load` times the saturation rate of the decode instances."""
    profile = cluster(instances, ARMS["vllm"]).instances[0].profile
    sample = poisson_requests(dataset, GENERATORS[dataset].lengths, _SAMPLED, 1.0, 0)
    return load * saturation_rate(profile, sample, instances - prefill_instances(instances))


def serve_at_load(dataset: str, arm: str, instances: int, load: float, span_s: float, seed: int) -> Figures:
    """`serve` at a fraction of the saturation rate."""
    return serve(dataset, arm, instances, rate_at(dataset, instances, load), span_s, seed)


def serve(dataset: str, arm: str, instances: int, rate_per_s: float, span_s: float, seed: int) -> Figures:
    """Requests of a generator for `span_s` seconds at `rate_per_s`, under one scheduler."""
    count = max(1, round(rate_per_s * span_s))
    requests = poisson_requests(dataset, GENERATORS[dataset].lengths, count, rate_per_s, seed)
    chosen = ARMS[arm]
    spec = cluster(instances, chosen)
    policy = chosen.policy()
    result = simulate(spec, requests, policy, Fcfs(), seed=seed, sample_interval_s=1.0)
    done = [r for r in result.requests if r.finish_s is not None]
    tpot = np.array([r.tpot_s for r in done], np.float64)
    in_time = np.array([r.finish_s for r in done], np.float64) <= span_s
    series = result.series
    chosen_times = (series.times_s >= _RAMP * span_s) & (series.times_s <= span_s)
    decoders = prefill_instances(instances)
    steps_ms = 1e3 * series.step_s[chosen_times, decoders:]
    kv = series.kv_used_tokens[chosen_times, decoders:]
    capacity = spec.instances[0].kv_blocks * spec.instances[0].block_tokens
    return {
        "rate_per_s": rate_per_s,
        "finished": float(len(done)),
        "tpot_p50_ms": 1e3 * float(np.median(tpot)),
        "tpot_p99_ms": 1e3 * float(np.percentile(tpot, 99)),
        "throughput_per_s": float(in_time.sum()) / span_s,
        "goodput_per_s": float((in_time & (tpot <= TPOT_SLO_S)).sum()) / span_s,
        "variance_ms2": float(steps_ms.var(axis=1).mean()),
        "spread": _spread(steps_ms),
        "kv_share": float(kv.mean()) / capacity,
        "kv_max_share": float(kv.max()) / capacity,
        "recomputed": float(sum(r.preemptions_recomputed for r in done)),
        "migrations": float(sum(m.outcome is MigrationOutcome.COMMITTED for m in result.migrations)),
        **(_ticks(policy.tick_s, span_s) if isinstance(policy, TimedAres) else {}),
    }


def _ticks(tick_s: Sequence[float], span_s: float) -> dict[str, float]:
    """Milliseconds of Algorithm 1 on this machine while requests arrive, without the ramp."""
    # One a second.
    full = 1e3 * np.array(tick_s[int(_RAMP * span_s) : int(span_s)])
    return {"tick_mean_ms": float(full.mean()), "tick_max_ms": float(full.max())}


def _spread(steps_ms: NDArray[np.float64]) -> float:
    """Mean over time of (slowest - fastest) / mean of the instances' steps."""
    means = steps_ms.mean(axis=1)
    busy = means > 0.0
    return float(((steps_ms.max(axis=1) - steps_ms.min(axis=1))[busy] / means[busy]).mean())
