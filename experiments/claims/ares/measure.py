"""Run ARES's cluster once, and measure it in a steady state.

Requests arrive throughout. The first third fills the cluster: a request of 32,000 tokens decodes for nine
minutes or more. The last eighth keeps it full while the others end. Figures cover the time in between: the
requests that arrive then, and averages over that time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from experiments.claims.ares.cluster import ARMS, PROFILE, TimedAres, cluster, prefill_instances
from experiments.claims.base import Figures
from experiments.claims.saturation import poisson_at_load
from simulator.records import MigrationOutcome, Series, SimResult
from simulator.request import SimRequest
from simulator.simulation import simulate
from simulator.workloads.arrivals import poisson_requests
from simulator.workloads.generators import GENERATORS
from tailrace.intra.orders import Fcfs
from tailrace.profiles import load_profile

# TPOT up to which a request counts as good; the paper names none. Twice the decode step at half-full KV
# (section 5.3: 18.23 ms).
TPOT_SLO_S: Final = 2 * 0.01823
# Shares of the requests.
WARM_UP: Final = 1 / 3
_MEASURED_UNTIL: Final = 7 / 8
_SAMPLE_S: Final = 2.0
# QoE is not evaluated: with a pace so slow that no token is late, it costs no time.
_IRRELEVANT_PACE_S: Final = 1e3


def serve_at_load(dataset: str, arm: str, instances: int, load: float, count: int, seed: int) -> Figures:
    """Serve `count` requests of a generator at `load` times the saturation rate of the decode instances."""
    decoders = instances - prefill_instances(instances)
    lengths = GENERATORS[dataset].lengths
    requests = poisson_at_load(dataset, lengths, count, load, seed, load_profile(PROFILE), decoders)
    return _serve(requests, arm, instances, seed)


def serve_at_rate(
    dataset: str, arm: str, instances: int, rate_per_s: float, count: int, seed: int
) -> Figures:
    """Serve `count` requests of a generator at a rate."""
    requests = poisson_requests(dataset, GENERATORS[dataset].lengths, count, rate_per_s, seed)
    return _serve(requests, arm, instances, seed)


def _serve(requests: Sequence[SimRequest], arm: str, instances: int, seed: int) -> Figures:
    chosen = ARMS[arm]
    spec = replace(cluster(instances, chosen), tpot_target_s=_IRRELEVANT_PACE_S)
    policy = chosen.policy()
    result = simulate(spec, requests, policy, Fcfs(), seed=seed, sample_interval_s=_SAMPLE_S)
    count = len(requests)
    begin_s = requests[int(WARM_UP * count)].arrival_s
    end_s = requests[int(_MEASURED_UNTIL * count)].arrival_s
    seconds = end_s - begin_s
    arrived = [r for r in result.requests if begin_s <= r.arrival_s < end_s]
    tpot = np.array([r.tpot_s for r in arrived], np.float64)
    ended = [r.tpot_s for r in result.requests if r.finish_s is not None and begin_s <= r.finish_s < end_s]
    good = sum(tpot_s is not None and tpot_s <= TPOT_SLO_S for tpot_s in ended)
    capacity = spec.instances[0].kv_blocks * spec.instances[0].block_tokens
    figures = {
        "rate_per_s": len(arrived) / seconds,
        "finished": float(sum(r.finish_s is not None for r in result.requests)),
        "tpot_p50_ms": 1e3 * float(np.median(tpot)),
        "tpot_p99_ms": 1e3 * float(np.percentile(tpot, 99)),
        "throughput_per_s": len(ended) / seconds,
        "goodput_per_s": good / seconds,
        "recomputed": float(sum(r.preemptions_recomputed for r in arrived)),
        "rescheduled_per_s": _rescheduled(result, begin_s, end_s) / seconds,
    }
    figures |= _over_time(result.series, begin_s, end_s, prefill_instances(instances), capacity)
    if isinstance(policy, TimedAres):
        figures |= _ticks(policy.tick_s, begin_s, end_s)
    return figures


def _rescheduled(result: SimResult, begin_s: float, end_s: float) -> int:
    """Count the committed migrations of Algorithm 1."""
    return sum(
        m.reason == "rescheduling"
        and m.outcome is MigrationOutcome.COMMITTED
        and begin_s <= m.requested_s < end_s
        for m in result.migrations
    )


def _over_time(
    series: Series, begin_s: float, end_s: float, decoders_from: int, capacity: int
) -> dict[str, float]:
    """Compute averages over time of the decode instances."""
    times = (series.times_s >= begin_s) & (series.times_s < end_s)
    steps_ms = 1e3 * series.step_s[times, decoders_from:]
    decoding = series.decoding[times, decoders_from:]
    kv = series.kv_used_tokens[times, decoders_from:]
    return {
        "variance_ms2": float(steps_ms.var(axis=1).mean()),
        "spread": _spread(steps_ms),
        "step_p99_ms": _token_percentile(steps_ms.ravel(), decoding.ravel(), 0.99),
        "kv_share": float(kv.mean()) / capacity,
        "kv_fullest_share": float(kv.max(axis=1).mean()) / capacity,
    }


def _token_percentile(steps_ms: NDArray[np.float64], decoding: NDArray[np.int64], level: float) -> float:
    """Return a percentile of step times over tokens, from samples in time.

    Samples contain a step more often the longer it takes, and a step makes one token per request, so each
    sample is weighted by requests over duration.
    """
    seen = steps_ms > 0.0
    steps_ms, weights = steps_ms[seen], decoding[seen] / steps_ms[seen]
    order = steps_ms.argsort()
    reached = weights[order].cumsum()
    return float(steps_ms[order[reached.searchsorted(level * reached[-1])]])


def _ticks(tick_s: Sequence[float], begin_s: float, end_s: float) -> dict[str, float]:
    """Return the time of Algorithm 1 on this machine, in milliseconds."""
    # One tick per second.
    measured = 1e3 * np.array(tick_s[int(begin_s) : int(end_s)])
    return {"tick_mean_ms": float(measured.mean()), "tick_max_ms": float(measured.max())}


def _spread(steps_ms: NDArray[np.float64]) -> float:
    """Return the mean over time of (slowest - fastest) / mean of the instances' steps."""
    means = steps_ms.mean(axis=1)
    busy = means > 0.0
    return float(((steps_ms.max(axis=1) - steps_ms.min(axis=1))[busy] / means[busy]).mean())
