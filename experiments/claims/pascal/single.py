"""Rows P13, P14, P16 and P17: one GPU with half of its KV memory (section III-A, figures 4 and 5).

The rate is not given, but bounded: the full device holds all KV at any time, without blocking or preemption.
Used here is the highest such rate: the mean KV plus three standard deviations fills the device at 0.8 times
its saturation rate (with Poisson arrivals the variance is mean x E[sum of context^2] / E[sum of context],
sums over a request's steps).

The rate decides P14 and P17: below that bound RR equals the oracle, above it FCFS and RR both wait. So the
figures include the curve from 0.5 to 0.9, and these orderings must hold at every load up to that bound.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

import numpy as np

from experiments.claims.base import Effort, Experiment, Figures, Finding, Run, Verdict
from experiments.claims.pascal.circular import CircularRoundRobin
from experiments.claims.pascal.cluster import PROFILE
from experiments.claims.pascal.rows import P13, P14, P16, P17
from experiments.claims.saturation import poisson_at_load
from experiments.claims.verdicts import (
    format_estimate,
    judge_effect,
    judge_ordering,
    judged,
    means_of,
    number,
    spreads_of,
    weakest,
)
from simulator.cluster import ClusterSpec
from simulator.estimate import Estimate, estimate
from simulator.records import RequestRecord
from simulator.simulation import simulate
from simulator.workloads.generators import GENERATORS
from tailrace.intra.base import IntraPolicy
from tailrace.intra.orders import Fcfs, QuantumRoundRobin
from tailrace.policy.least_loaded import FOOTPRINT, LeastLoaded
from tailrace.profiles import load_profile

REQUESTS: Final = 300
LOAD: Final = 0.8
LOADS: Final = (0.5, 0.6, 0.7, LOAD, 0.9)
SEEDS: Final = tuple(range(1, 11))
_TTFAT_S: Final = 0.25
_TPOT_S: Final = 0.1
_QOE_LIMIT: Final = 0.95
_REASONING: Final = "reasoning_phase"
_ANSWERING: Final = "answering_phase"
_SHORT: Final = 128
_LONG: Final = 2048
_INTRA: Final[Mapping[str, Callable[[], IntraPolicy]]] = {
    "oracle": Fcfs,
    "fcfs": Fcfs,
    "rr": QuantumRoundRobin,
    "rr_circular": CircularRoundRobin,
}


def one_gpu(dataset: str, arm: str, load: float, requests: int, seed: int) -> Figures:
    """Run one scheduler on one GPU; "oracle" has unlimited memory, the others half of the device's."""
    profile = load_profile(PROFILE)
    capacity = 100 * profile.kv_capacity_tokens if arm == "oracle" else profile.kv_capacity_tokens // 2
    spec = ClusterSpec.uniform(1, profile, kv_capacity_tokens=capacity, max_num_seqs=requests)
    sent = poisson_at_load(dataset, GENERATORS[dataset].lengths, requests, load, seed, profile, 1)
    done = simulate(spec, sent, LeastLoaded(load=FOOTPRINT), _INTRA[arm](), seed=seed).requests
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
    """Return the QoE of an answer that the user expects 0.25 s after its request arrived (figure 5).

    The record's QoE counts from the first token. With D from then until the last token is read, n tokens and
    the user's pace p, the expected area is (D + late) n - p n (n - 1) / 2 (tailrace/qoe.py). D is the later
    of the user's pace and the last token's time; the contribution of stalls that are made up for is
    neglected.
    """
    if record.qoe is None or record.ttft_s is None or record.latency_s is None:
        return 0.0
    count = record.answer_tokens
    read_s = max((count - 1) * _TPOT_S, record.latency_s - record.ttft_s)
    triangle = _TPOT_S * count * (count - 1) / 2.0
    read = record.qoe * (read_s * count - triangle)
    expected = (read_s + max(0.0, record.ttft_s - _TTFAT_S)) * count - triangle
    return read / expected


def _run_name(dataset: str, arm: str, load: float, seed: int) -> str:
    return f"{dataset}/{arm}/{load:g}/{seed}"


def _runs(effort: Effort) -> tuple[Run, ...]:
    # All 300 requests, even in a quick check: their number determines the operating point.
    return tuple(
        Run(_run_name(dataset, arm, load, seed), one_gpu, (dataset, arm, load, REQUESTS, seed), 0.4)
        for dataset in (_REASONING, _ANSWERING)
        for arm in _INTRA
        for load in (LOADS if dataset == _ANSWERING else (LOAD,))
        for seed in effort.seeds(SEEDS)
    )


# Figures of each seed: by dataset, scheduler, figure and load.
_PerSeed = Callable[[str, str, str, float], list[float]]


def judge(effort: Effort, figures: Mapping[str, Figures]) -> Sequence[Finding]:
    """Judge P13, P14, P16 and P17."""
    seeds = effort.seeds(SEEDS)

    def per_seed(dataset: str, arm: str, name: str, load: float) -> list[float]:
        return [number(figures[_run_name(dataset, arm, load, seed)], name) for seed in seeds]

    return (
        *judged((P13,), _blocking, per_seed),
        *judged((P14,), _attained, per_seed),
        *judged((P16,), _delayed_lengths, per_seed),
        *judged((P17,), _long_answers, per_seed),
    )


def _ratios(
    per_seed: _PerSeed, dataset: str, arm: str, other: str, name: str, load: float = LOAD
) -> list[float]:
    """Return a latency under one scheduler over that under another, seed by seed."""
    ours, others = (per_seed(dataset, one, name, load) for one in (arm, other))
    return [mine / theirs for mine, theirs in zip(ours, others, strict=True)]


def _blocking(per_seed: _PerSeed) -> Finding:
    latency = {
        f"{arm}_{name}_ratio": estimate(_ratios(per_seed, _REASONING, arm, "oracle", f"latency_{name}_s"))
        for arm, name in (("fcfs", "short"), ("rr", "long"), ("rr_circular", "long"))
    }
    fcfs, rr, circular = latency.values()
    return Finding(
        P13.claim_id,
        f"{format_estimate(fcfs, '.2f')}x / {format_estimate(rr, '.2f')}x by quanta used, "
        f"{format_estimate(circular, '.2f')}x in circular order",
        weakest([judge_effect(fcfs.mean - 1.0, 4.14), judge_effect(rr.mean - 1.0, 0.75)]),
        "blocking affects the short, preemption the long; judged by quanta used (section V-B), which keeps "
        "the longest out while shorter ones arrive; in circular order (section V-A) they have their turn "
        f"sooner, and RR's part {judge_effect(circular.mean - 1.0, 0.75).value}",
        means_of(latency),
        spreads_of(latency),
    )


def _delayed_lengths(per_seed: _PerSeed) -> Finding:
    ratios = {
        f"{arm}_{name}": _ratios(per_seed, _REASONING, arm, "oracle", f"latency_{name}_s")
        for arm in ("fcfs", "rr", "rr_circular")
        for name in ("short", "long")
    }
    found = {f"{name}_ratio": estimate(each) for name, each in ratios.items()}

    def more(one: str, other: str) -> bool:
        return _exceeds(estimate([a - b for a, b in zip(ratios[one], ratios[other], strict=True)]), 0.0)

    def both(arm: str) -> str:
        short, long = (format_estimate(found[f"{arm}_{name}_ratio"], ".2f") for name in ("short", "long"))
        return f"{short}x : {long}x"

    return Finding(
        P16.claim_id,
        f"FCFS {both('fcfs')}, RR {both('rr')}",
        judge_ordering([more("fcfs_short", "fcfs_long"), more("rr_long", "rr_short")]),
        "latency over the oracle's; a wait for memory is as long for all, and more quanta are preempted more "
        f"often. RR in circular order {both('rr_circular')}",
        means_of(found),
        spreads_of(found),
    )


def _long_answers(per_seed: _PerSeed) -> Finding:
    found = {
        f"{arm}_{load:g}": estimate(_ratios(per_seed, _ANSWERING, arm, "fcfs", "latency_long_s", load))
        for arm in ("rr", "rr_circular")
        for load in LOADS
    }
    holding, circular = (
        [load for load in LOADS if _exceeds(found[f"{arm}_{load:g}"], 1.0)] for arm in ("rr", "rr_circular")
    )
    return Finding(
        P17.claim_id,
        ", ".join(f"{format_estimate(found[f'rr_{load:g}'], '.2f')}x at {load:g}" for load in LOADS),
        _over_loads(holding),
        f"RR over FCFS; longer beyond the interval {_at_loads(holding)}, in circular order "
        f"{_at_loads(circular)}",
        means_of(found),
        spreads_of(found),
    )


def _exceeds(found: Estimate, limit: float) -> bool:
    """Return whether a figure is above the limit beyond its spread."""
    return found.mean - (found.half_width or 0.0) > limit


def _attained(per_seed: _PerSeed) -> Finding:
    attained = {
        f"{name}_{arm}": estimate(per_seed(_ANSWERING, arm, name, LOAD))
        for arm in _INTRA
        for name in ("attained", "attained_long")
    }
    curves: dict[str, float | Sequence[float]] = {"loads": list(LOADS)}
    for arm in _INTRA:
        for name in ("attained", "attained_long"):
            curves[f"curve_{name}_{arm}"] = [
                estimate(per_seed(_ANSWERING, arm, name, load)).mean for load in LOADS
            ]
    holding = [load for load in LOADS if _p14_holds(per_seed, load)]
    circular = [load for load in LOADS if _p14_holds(per_seed, load, "rr_circular")]
    return Finding(
        P14.claim_id,
        f"{format_estimate(attained['attained_rr'], '.0%')} vs "
        f"{format_estimate(attained['attained_fcfs'], '.0%')}; "
        f"at 2048: {attained['attained_long_rr'].mean:.0%} vs oracle "
        f"{attained['attained_long_oracle'].mean:.0%}; holds {_at_loads(holding)}",
        _over_loads(holding),
        "the rate decides: where the halved memory overflows only briefly, RR starts every answer "
        "immediately and keeps it ahead of its reader; nearer saturation even its answers wait longer. RR in "
        f"circular order {format_estimate(attained['attained_rr_circular'], '.0%')}; holds "
        f"{_at_loads(circular)}",
        {**means_of(attained), **curves},
        spreads_of(attained),
    )


def _at_loads(loads: Sequence[float]) -> str:
    return f"at loads {', '.join(f'{load:g}' for load in loads)}" if loads else "at no load tried"


def _p14(per_seed: _PerSeed, load: float, rr: str) -> list[bool]:
    """Return whether this RR attains more than FCFS, and at 2048 tokens as much as the oracle."""

    def mean(arm: str, name: str) -> float:
        return estimate(per_seed(_ANSWERING, arm, name, load)).mean

    long = mean(rr, "attained_long") >= mean("oracle", "attained_long") - 0.05
    return [mean(rr, "attained") > mean("fcfs", "attained"), long]


def _p14_holds(per_seed: _PerSeed, load: float, rr: str = "rr") -> bool:
    return all(_p14(per_seed, load, rr))


def _over_loads(holding: Sequence[float]) -> Verdict:
    """Judge an ordering whose rate the paper leaves open, over all loads at which the oracle never waits."""
    open_loads = [load for load in LOADS if load <= LOAD]
    if all(load in holding for load in open_loads):
        return Verdict.HOLDS
    return Verdict.DIRECTION if holding else Verdict.DOES_NOT_HOLD


def one_gpu_rows(effort: Effort) -> Experiment:
    """Return the experiment of rows P13, P14, P16 and P17."""
    return Experiment("pascal-one-gpu", (P13, P14, P16, P17), _runs(effort), partial(judge, effort))
