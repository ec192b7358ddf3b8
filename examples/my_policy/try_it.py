"""Compare the policy with two that ship with Tailrace, on requests to a reasoning model."""

from __future__ import annotations

import numpy as np

from simulator.cluster import ClusterSpec
from simulator.simulation import simulate
from simulator.workloads.resolve import WorkloadOptions, resolve_workload
from tailrace.intra.orders import Fcfs
from tailrace.policy import registry
from tailrace.profiles import load_profile

POLICIES = ("round_robin", "least_loaded", "headroom")
SEEDS = (1, 2, 3)


def main() -> None:
    """Print a line for each policy: medians over the seeds."""
    cluster = ClusterSpec.uniform(4, load_profile("r1-distill-qwen-32b-h100"))
    print(f"{'policy':14}{'TTFT P50':>10}{'TTFT P99':>10}{'QoE >= 0.95':>13}{'migrations':>12}")
    for name in POLICIES:
        runs = []
        for seed in SEEDS:
            options = WorkloadOptions(seed=seed, rate_per_s=4.0, count=300, max_model_len=32_768)
            workload = resolve_workload("r1", options)
            result = simulate(cluster, workload.requests, registry.load(name), Fcfs(), seed=seed)
            ttft_s = [request.ttft_s for request in result.requests if request.ttft_s is not None]
            smooth = np.mean([request.qoe >= 0.95 for request in result.requests if request.qoe is not None])
            runs.append((*np.percentile(ttft_s, [50, 99]), 100 * smooth, len(result.migrations)))
        p50, p99, smooth, migrations = np.median(runs, axis=0)
        print(f"{name:14}{p50:8.1f} s{p99:8.1f} s{smooth:12.1f}%{migrations:12.0f}")


main()
