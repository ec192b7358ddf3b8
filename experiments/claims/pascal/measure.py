"""Run PASCAL's cluster once."""

from __future__ import annotations

from typing import Final

import numpy as np

from experiments.claims.base import Figures
from experiments.claims.pascal.cluster import ARMS, INSTANCES, cluster
from experiments.claims.saturation import poisson_at_load
from simulator.goodput import tail_by_bin
from simulator.records import MigrationOutcome
from simulator.simulation import simulate
from simulator.workloads.generators import GENERATORS

# QoE below which an answer violates its SLO (section V-A).
QOE_LIMIT: Final = 0.95
# Share of the requests that fill the cluster at the start and are not counted.
WARM_UP: Final = 0.25


def serve(dataset: str, arm: str, load: float, count: int, seed: int) -> Figures:
    """Serve `count` requests of a generator at `load` times the saturation rate, under one scheduler.

    All figures except the throughput are those of the requests after the warm-up.
    """
    generator = GENERATORS[dataset]
    chosen = ARMS[arm]
    spec = cluster(chosen)
    profile = spec.instances[0].profile
    requests = poisson_at_load(dataset, generator.lengths, count, load, seed, profile, INSTANCES)
    result = simulate(spec, requests, chosen.policy(), chosen.intra(), seed=seed)
    warm_s = requests[int(WARM_UP * count)].arrival_s
    finished = [r for r in result.requests if r.ttft_s is not None]
    done = [r for r in finished if r.arrival_s >= warm_s]
    ttft = np.array([r.ttft_s for r in done], np.float64)
    latency = np.array([r.latency_s for r in done], np.float64)
    tails = tail_by_bin((r.reasoning_tokens, r.ttft_s) for r in done if r.ttft_s is not None)
    blocking = [r.answer_blocking_s for r in done if r.answer_blocking_s is not None]
    committed = [m for m in result.migrations if m.outcome is MigrationOutcome.COMMITTED]
    makespan_s = max(r.finish_s for r in finished if r.finish_s is not None) - requests[0].arrival_s
    return {
        "rate_per_s": count / requests[-1].arrival_s,
        "finished": float(len(finished)),
        "bins": [float(start) for start in tails],
        "tails_s": list(tails.values()),
        "ttft_p50_s": float(np.median(ttft)),
        "ttft_p99_s": float(np.percentile(ttft, 99)),
        "violations": float(np.mean([r.qoe is None or r.qoe < QOE_LIMIT for r in done])),
        "tokens_per_s": sum(r.output_tokens for r in finished) / makespan_s,
        "latency_p50_s": float(np.median(latency)),
        "latency_p99_s": float(np.percentile(latency, 99)),
        "blocking_p99_s": float(np.percentile(blocking, 99)) if blocking else 0.0,
        "transfer_p99_s": float(np.percentile([m.transfer_s for m in committed], 99)) if committed else 0.0,
        "migrations": float(len(committed)),
        "swaps": float(sum(r.preemptions_swapped for r in done)),
    }
