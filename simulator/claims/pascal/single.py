"""Rows P13 and P14: one GPU with half of its KV memory (section III-A, figures 4 and 5).

The rate is not given, but bounded: the full device holds all KV caches at any time, without blocking or
preempting. Taken is the highest such rate: mean KV and three standard deviations of it fill the device at 0.8
times its saturation rate (with Poisson arrivals the variance is mean x E[sum of context^2] / E[sum of
context], sums over a request's steps).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from simulator.claims.base import Experiment, Figures, Finding, Run
from simulator.claims.figures import number
from simulator.claims.pascal.cluster import PROFILE
from simulator.claims.pascal.rows import P13, P14
from simulator.claims.saturation import poisson_at_load
from simulator.claims.verdicts import of_effect, of_ordering, weakest
from simulator.cluster import ClusterSpec
from simulator.records import RequestRecord
from simulator.run import simulate
from simulator.workloads.generators import GENERATORS
from tailrace.intra.base import IntraPolicy
from tailrace.intra.fcfs import Fcfs
from tailrace.intra.round_robin import QuantumRoundRobin
from tailrace.policy.min_kv import MinKv
from tailrace.profiles import load_profile

REQUESTS: Final = 300
LOAD: Final = 0.8
SEEDS: Final = tuple(range(1, 11))
_TTFAT_S: Final = 0.25
_TPOT_S: Final = 0.1
_QOE_LIMIT: Final = 0.95
_REASONING: Final = "reasoning_phase"
_ANSWERING: Final = "answering_phase"
_SHORT: Final = 128
_LONG: Final = 2048
_INTRA: Final[Mapping[str, type[Fcfs] | type[QuantumRoundRobin]]] = {
    "oracle": Fcfs,
    "fcfs": Fcfs,
    "rr": QuantumRoundRobin,
}


def one_gpu(dataset: str, arm: str, requests: int, seed: int) -> Figures:
    """One scheduler on one GPU; "oracle" has all the memory it wants, the others half of the device's."""
    profile = load_profile(PROFILE)
    capacity = 100 * profile.kv_capacity_tokens if arm == "oracle" else profile.kv_capacity_tokens // 2
    spec = ClusterSpec.uniform(1, profile, kv_capacity_tokens=capacity, max_num_seqs=requests)
    sent = poisson_at_load(dataset, GENERATORS[dataset].lengths, requests, LOAD, seed, profile, 1)
    intra: IntraPolicy = _INTRA[arm]()
    done = simulate(spec, sent, MinKv(), intra, seed=seed).requests
    latency = np.array([r.latency_s for r in done], np.float64)
    tokens = np.array([max(r.reasoning_tokens, r.answer_tokens) for r in done])
    attained = np.array([qoe_with_ttfat(r) >= _QOE_LIMIT for r in done])
    return {
        "latency_short_s": float(latency[tokens == _SHORT].mean()),
        "latency_long_s": float(latency[tokens == _LONG].mean()),
        "attained": float(attained.mean()),
        "attained_long": float(attained[tokens == _LONG].mean()),
    }


def qoe_with_ttfat(record: RequestRecord) -> float:
    """QoE of an answer that the user expects 0.25 s after its request arrived (figure 5).

    The record's QoE counts from the first token. With D from then until the last token is read, n tokens
    and the user's pace p, the expected area is (D + late) n - p n (n - 1) / 2 (tailrace/qoe.py). D is the
    later of the user's pace and the last token's time; what a stall that is made up for adds between is
    left out.
    """
    if record.qoe is None or record.ttft_s is None or record.latency_s is None:
        return 0.0
    count = record.answer_tokens
    read_s = max((count - 1) * _TPOT_S, record.latency_s - record.ttft_s)
    triangle = _TPOT_S * count * (count - 1) / 2.0
    read = record.qoe * (read_s * count - triangle)
    expected = (read_s + max(0.0, record.ttft_s - _TTFAT_S)) * count - triangle
    return read / expected


def _runs() -> tuple[Run, ...]:
    return tuple(
        Run(f"{dataset}/{arm}/{seed}", one_gpu, (dataset, arm, REQUESTS, seed), 0.4)
        for dataset in (_REASONING, _ANSWERING)
        for arm in _INTRA
        for seed in SEEDS
    )


def judge(figures: Mapping[str, Figures]) -> Sequence[Finding]:
    """P13 and P14."""

    def mean(dataset: str, arm: str, name: str) -> float:
        return float(np.mean([number(figures[f"{dataset}/{arm}/{seed}"], name) for seed in SEEDS]))

    fcfs = mean(_REASONING, "fcfs", "latency_short_s") / mean(_REASONING, "oracle", "latency_short_s")
    rr = mean(_REASONING, "rr", "latency_long_s") / mean(_REASONING, "oracle", "latency_long_s")
    first = Finding(
        P13.claim_id,
        f"{fcfs:.2f}x / {rr:.2f}x",
        weakest([of_effect(fcfs - 1.0, 4.14), of_effect(rr - 1.0, 0.75)]),
        "blocking falls on the short, preemption on the long; RR by quanta used (section V-B) keeps the "
        "longest out for as long as shorter ones come, which turns in a circle (figure 2c) would not",
        {"fcfs_short_ratio": fcfs, "rr_long_ratio": rr},
    )
    attained = {arm: mean(_ANSWERING, arm, "attained") for arm in _INTRA}
    long = {arm: mean(_ANSWERING, arm, "attained_long") for arm in _INTRA}
    second = Finding(
        P14.claim_id,
        f"{attained['rr']:.0%} vs {attained['fcfs']:.0%}; at 2048: {long['rr']:.0%} vs oracle "
        f"{long['oracle']:.0%}",
        of_ordering([attained["rr"] > attained["fcfs"], long["rr"] >= long["oracle"] - 0.05]),
        "an answer that starts at once is ahead of its reader before it is preempted, one that queues never "
        "is; at 2048 tokens our RR keeps it waiting too long (see P13)",
        {
            **{f"attained_{arm}": value for arm, value in attained.items()},
            **{f"attained_2048_{arm}": value for arm, value in long.items()},
        },
    )
    return first, second


SINGLE: Final = Experiment("pascal-one-gpu", (P13, P14), _runs(), judge)
