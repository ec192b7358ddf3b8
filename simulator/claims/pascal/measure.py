"""One run of PASCAL's cluster."""

from __future__ import annotations

from typing import Final

import numpy as np

from simulator.claims.base import Figures
from simulator.claims.pascal.cluster import ARMS, INSTANCES, cluster
from simulator.claims.saturation import poisson_at_load
from simulator.records import MigrationOutcome
from simulator.run import simulate
from simulator.tails import tail_ttft_by_bin
from simulator.workloads.generators import GENERATORS

# QoE below which an answer violates its SLO (section V-A).
QOE_LIMIT: Final = 0.95


def serve(dataset: str, arm: str, load: float, count: int, seed: int) -> Figures:
    """`count` requests of a generator at `load` times the saturation rate, under one scheduler."""
    generator = GENERATORS[dataset]
    spec = cluster()
    profile = spec.instances[0].profile
    requests = poisson_at_load(dataset, generator.lengths, count, load, seed, profile, INSTANCES)
    chosen = ARMS[arm]
    result = simulate(spec, requests, chosen.policy(), chosen.intra(), seed=seed)
    done = [r for r in result.requests if r.ttft_s is not None]
    ttft = np.array([r.ttft_s for r in done], np.float64)
    latency = np.array([r.latency_s for r in done], np.float64)
    tails = tail_ttft_by_bin(done)
    blocking = [r.answer_blocking_s for r in done if r.answer_blocking_s is not None]
    committed = [m for m in result.migrations if m.outcome is MigrationOutcome.COMMITTED]
    makespan_s = max(r.finish_s for r in done if r.finish_s is not None) - requests[0].arrival_s
    return {
        "rate_per_s": count / requests[-1].arrival_s,
        "finished": float(len(done)),
        "bins": [float(start) for start in tails],
        "tails_s": list(tails.values()),
        "ttft_p50_s": float(np.median(ttft)),
        "ttft_p99_s": float(np.percentile(ttft, 99)),
        "violations": float(np.mean([r.qoe is None or r.qoe < QOE_LIMIT for r in done])),
        "tokens_per_s": sum(r.output_tokens for r in done) / makespan_s,
        "latency_p50_s": float(np.median(latency)),
        "latency_p99_s": float(np.percentile(latency, 99)),
        "blocking_p99_s": float(np.percentile(blocking, 99)) if blocking else 0.0,
        "transfer_p99_s": float(np.percentile([m.transfer_s for m in committed], 99)) if committed else 0.0,
        "migrations": float(len(committed)),
        "swaps": float(sum(r.preemptions_swapped for r in done)),
    }
