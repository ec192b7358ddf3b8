"""Rows A1 to A5 and A12: one prefill instance and three decode instances.

Rates. Rows about a rate that the paper names use it: RPS 0.1 (A12), 0.13 (A2) and 0.17 (A5). For A1 to A4 the
paper's highest rate is where its baseline runs out of KV: with our profile the baseline does not at RPS 0.17
(KV half full), and Alpaca's RPS 1.7 would fill three instances eight times over. So the rate is searched for:
on a curve over loads from 0.8 to 1.0 of the saturation rate (experiments/claims/saturation.py), it is the
load at which the baseline's P99 TPOT equals the paper's. The other schedulers are judged at that load.
Results at the literal RPS 0.17 are reported too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

from experiments.claims.ares.measure import serve_at_load, serve_at_rate
from experiments.claims.ares.results import Results, geometric_mean, load_level, rate_level, run_name
from experiments.claims.ares.rows import A1, A2, A3, A4, A5, A12
from experiments.claims.base import QUICK, Claim, Effort, Experiment, Figures, Finding, Run, Verdict
from experiments.claims.verdicts import (
    format_estimate,
    judge_effect,
    judge_ordering,
    judge_value,
    judged,
    means_of,
    spreads_of,
    weakest,
)
from simulator.estimate import Estimate

SHAREGPT: Final = "sharegpt_ares"
ALPACA: Final = "alpaca_ares"
INSTANCES: Final = 4
# About 4,000 s at 0.9 of saturation.
REQUESTS: Final = 900
SEEDS: Final = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
LOADS: Final = (0.8, 0.85, 0.9, 0.95, 1.0)
# On either side of the load that is searched for.
_QUICK_LOADS: Final = (0.85, 1.0)
# P99 TPOT of the paper's baseline, in ms (figures 10c and f).
_PAPER_P99_MS: Final[Mapping[str, float]] = {SHAREGPT: 96.3, ALPACA: 100.6}
_ARMS: Final[Mapping[str, tuple[str, ...]]] = {
    SHAREGPT: ("vllm", "rescheduling", "ares", "ares_oracle"),
    ALPACA: ("vllm", "rescheduling", "ares"),
}
# Rates on the paper's axis (ShareGPT), the schedulers compared there, and the seeds.
_RATES: Final[Mapping[float, tuple[str, ...]]] = {
    0.17: _ARMS[SHAREGPT],
    0.13: ("rescheduling", "ares"),
    0.1: ("round_robin", "vllm", "ares"),
}
_RATE_SEEDS: Final = SEEDS[:5]
# Seconds on one core.
_COST_S: Final[Mapping[str, float]] = {"vllm": 1.0, "round_robin": 1.0, "rescheduling": 1.7}
_COST_OF_PREDICTING_S: Final = 3.0


def loads_of(effort: Effort) -> tuple[float, ...]:
    """Return the loads of the curve."""
    return _QUICK_LOADS if effort is QUICK else LOADS


def _runs(effort: Effort) -> tuple[Run, ...]:
    runs = [
        Run(
            run_name(dataset, arm, load_level(load), seed),
            serve_at_load,
            (dataset, arm, INSTANCES, load, REQUESTS, seed),
            _COST_S.get(arm, _COST_OF_PREDICTING_S),
        )
        for dataset, arms in _ARMS.items()
        for arm in arms
        for load in loads_of(effort)
        for seed in effort.seeds(SEEDS)
    ]
    runs += [
        Run(
            run_name(SHAREGPT, arm, rate_level(rate), seed),
            serve_at_rate,
            (SHAREGPT, arm, INSTANCES, rate, REQUESTS, seed),
            _COST_S.get(arm, _COST_OF_PREDICTING_S),
        )
        for rate, arms in _RATES.items()
        for arm in arms
        for seed in effort.seeds(_RATE_SEEDS)
    ]
    return tuple(runs)


def judge(effort: Effort, figures: Mapping[str, Figures]) -> Sequence[Finding]:
    """Judge A1 to A5 and A12 from all runs."""
    curve = Results(figures, loads_of(effort), effort.seeds(SEEDS))
    at_rates = Results(figures, (), effort.seeds(_RATE_SEEDS))
    return (
        *judged((A1,), _goodput, curve),
        *judged((A2,), _throughput, curve, at_rates),
        *judged((A3,), _tail, A3, curve, SHAREGPT, (-0.706, -0.141), at_rates),
        *judged((A4,), _tail, A4, curve, ALPACA, (-0.197, -0.454), None),
        *judged((A5,), _variance, curve, at_rates),
        *judged((A12,), _divergence, at_rates),
    )


def _matched_load(curve: Results, dataset: str) -> float:
    return curve.match(dataset, "vllm", "tpot_p99_ms", _PAPER_P99_MS[dataset]).load


def _goodput(curve: Results) -> Finding:
    load = _matched_load(curve, SHAREGPT)
    found = {
        f"ares_vs_{arm}": _plus_one(curve.change_at_load(SHAREGPT, ("ares", arm), load, "goodput_per_s"))
        for arm in ("vllm", "rescheduling")
    }
    vllm, moved = found["ares_vs_vllm"], found["ares_vs_rescheduling"]
    top = load_level(curve.loads[-1])
    at_top = curve.ratio(SHAREGPT, ("ares", "vllm"), top, "goodput_per_s")
    figures: dict[str, float | Sequence[float]] = {**means_of(found), "load": load}
    for arm in _ARMS[SHAREGPT]:
        figures |= curve.curve(SHAREGPT, arm, "goodput_per_s")
    return Finding(
        A1.claim_id,
        f"{format_estimate(vllm, '.2f')}x / {format_estimate(moved, '.2f')}x",
        weakest([judge_effect(vllm.mean - 1.0, 0.93), judge_effect(moved.mean - 1.0, 0.16)]),
        f"at {load:.2f} of saturation, where vLLM's P99 TPOT is the paper's. The paper names no TPOT SLO; "
        "36.5 ms is two decode steps at half-full KV. Recomputing takes seconds of a request's minutes, so "
        f"most requests still meet it; at {curve.loads[-1]:g} of saturation the first ratio is "
        f"{format_estimate(at_top, '.2f')}x",
        figures,
        spreads_of(found),
    )


def _throughput(curve: Results, at_rates: Results) -> Finding:
    load = _matched_load(curve, SHAREGPT)
    found = {
        "ares_vs_vllm": _plus_one(curve.change_at_load(SHAREGPT, ("ares", "vllm"), load, "throughput_per_s")),
        "ares_vs_rescheduling_at_rps0.13": at_rates.ratio(
            SHAREGPT, ("ares", "rescheduling"), rate_level(0.13), "throughput_per_s"
        ),
    }
    high, low = found["ares_vs_vllm"], found["ares_vs_rescheduling_at_rps0.13"]
    equal = Verdict.HOLDS if abs(low.mean - 1.0) < 0.02 else Verdict.DIRECTION
    recomputed = curve.estimate(SHAREGPT, "vllm", load_level(curve.loads[-1]), "recomputed")
    return Finding(
        A2.claim_id,
        f"{format_estimate(high, '.2f')}x; {format_estimate(low, '.2f')}x",
        weakest([judge_effect(high.mean - 1.0, 0.75), equal]),
        f"even at {curve.loads[-1]:g} of saturation vLLM recomputes only {recomputed.mean:.0f} times while "
        "about 490 requests are measured: seconds each, compared to minutes of decoding; all schedulers "
        "serve what arrives",
        means_of(found) | {"load": load},
        spreads_of(found),
    )


def _tail(
    claim: Claim, curve: Results, dataset: str, paper: tuple[float, float], at_rates: Results | None
) -> Finding:
    """Judge P99 TPOT at the load where the baseline's equals the paper's."""
    matched = curve.match(dataset, "vllm", "tpot_p99_ms", _PAPER_P99_MS[dataset])
    load = matched.load
    found = {
        "migration": curve.change_at_load(dataset, ("rescheduling", "vllm"), load, "tpot_p99_ms"),
        "prediction": curve.change_at_load(dataset, ("ares", "rescheduling"), load, "tpot_p99_ms"),
        "total": curve.change_at_load(dataset, ("ares", "vllm"), load, "tpot_p99_ms"),
    }
    # What the shorter tail costs at the median.
    found["median"] = median = curve.change_at_load(dataset, ("ares", "vllm"), load, "tpot_p50_ms")
    arms = _ARMS[dataset]
    lines = {arm: curve.curve(dataset, arm, "tpot_p99_ms") for arm in arms}
    p99 = {arm: geometric_mean(curve.at_load(dataset, arm, load, "tpot_p99_ms")) for arm in arms}
    figures: dict[str, float | Sequence[float]] = {**means_of(found)}
    figures |= {f"p99_{arm}_ms": value for arm, value in p99.items()}
    figures["load"] = load
    for line in lines.values():
        figures |= line
    for arm in arms:
        figures |= curve.curve(dataset, arm, "step_p99_ms")
    for at in curve.loads:
        change = curve.change_at_load(dataset, ("ares", "rescheduling"), at, "tpot_p99_ms")
        figures[f"prediction_at_{load_level(at)}"] = change.mean
        found[f"prediction_at_{load_level(at)}"] = change
    literal = ""
    if at_rates is not None:
        level = rate_level(0.17)
        at_rate = {arm: at_rates.estimate(dataset, arm, level, "tpot_p99_ms") for arm in arms}
        figures |= {f"p99_{arm}_ms_at_rps_0.17": e.mean for arm, e in at_rate.items()}
        literal = "; at RPS 0.17: " + ", ".join(f"{at_rate[arm].mean:.1f}" for arm in arms[:3])
    where = f"at {load:.2f} of saturation" if matched.reached else f"at {load:g}, beyond the curve"
    total = (1.0 + paper[0]) * (1.0 + paper[1]) - 1.0
    significant = any(_differs(found[f"prediction_at_{load_level(at)}"], 0.0) for at in curve.loads)
    by_load = ", ".join(
        f"{found[f'prediction_at_{load_level(at)}'].mean:+.0%} at {at:g}" for at in curve.loads
    )
    return Finding(
        claim.claim_id,
        f"{p99['vllm']:.1f}, {p99['rescheduling']:.1f}, {p99['ares']:.1f} ms "
        f"({format_estimate(found['migration'], '+.0%')}, a further "
        f"{format_estimate(found['prediction'], '+.0%')}){literal}",
        weakest([judge_effect(found["total"].mean, total), _part(found["prediction"], paper[1])]),
        f"{where}, where vLLM's P99 is the paper's; median TPOT {format_estimate(median, '+.0%')} against "
        f"vLLM. Prediction: {by_load}"
        + ("" if significant else "; the seeds distinguish none of these from 0"),
        figures,
        spreads_of(found),
    )


def _variance(curve: Results, at_rates: Results) -> Finding:
    arms = _ARMS[SHAREGPT]
    level = rate_level(0.17)
    at_rate = {arm: at_rates.estimate(SHAREGPT, arm, level, "variance_ms2") for arm in arms}
    load = _matched_load(curve, SHAREGPT)
    matched = {arm: geometric_mean(curve.at_load(SHAREGPT, arm, load, "variance_ms2")) for arm in arms}
    ares, oracle, vllm = at_rate["ares"].mean, at_rate["ares_oracle"].mean, at_rate["vllm"].mean
    ordering = judge_ordering([ares <= 2.0 * oracle + 0.1, vllm > 5.0 * ares])
    figures: dict[str, float | Sequence[float]] = {f"variance_{arm}": e.mean for arm, e in at_rate.items()}
    figures |= {f"variance_{arm}_at_matched_load": v for arm, v in matched.items()}
    return Finding(
        A5.claim_id,
        f"{format_estimate(at_rate['ares'], '.2f')} ms^2 (oracle {oracle:.2f}, rescheduling "
        f"{at_rate['rescheduling'].mean:.2f}, vLLM {vllm:.1f})",
        weakest([ordering, judge_value(ares, 0.78)]),
        f"at RPS 0.17, the highest that the paper names for ShareGPT; at {load:.2f} of saturation ARES "
        f"{matched['ares']:.1f}, oracle {matched['ares_oracle']:.1f}, rescheduling "
        f"{matched['rescheduling']:.1f}, vLLM {matched['vllm']:.0f}, nearly all of it from the seconds in "
        "which an instance recomputes",
        figures,
        {f"variance_{arm}": e.half_width for arm, e in at_rate.items() if e.half_width is not None},
    )


def _divergence(at_rates: Results) -> Finding:
    arms = _RATES[0.1]
    spread = {arm: at_rates.estimate(SHAREGPT, arm, rate_level(0.1), "spread") for arm in arms}
    drift = min(spread["round_robin"].mean, spread["vllm"].mean)
    return Finding(
        A12.claim_id,
        f"spread {format_estimate(spread['round_robin'], '.0%')} / {format_estimate(spread['vllm'], '.0%')} "
        f"of the mean step (ARES {spread['ares'].mean:.0%})",
        judge_ordering([drift > 0.1, drift > spread["ares"].mean]),
        "outputs of 32,000 tokens stay for ten minutes where they were dispatched, and coincide by chance",
        {f"spread_{arm}": e.mean for arm, e in spread.items()},
        {f"spread_{arm}": e.half_width for arm, e in spread.items() if e.half_width is not None},
    )


def _differs(change: Estimate, value: float) -> bool:
    """Return whether the seeds distinguish a change from a value; a single seed always does."""
    return change.half_width is None or abs(change.mean - value) > change.half_width


def _part(change: Estimate, paper: float) -> Verdict:
    """Judge a part of an effect, which holds if the paper's number is within the spread."""
    return judge_effect(change.mean, paper) if _differs(change, paper) else Verdict.HOLDS


def _plus_one(change: Estimate) -> Estimate:
    return Estimate(1.0 + change.mean, change.half_width)


def serving_rows(effort: Effort) -> Experiment:
    """Return the experiment of rows A1 to A5 and A12."""
    return Experiment("ares-serving", (A1, A2, A3, A4, A5, A12), _runs(effort), partial(judge, effort))
