"""Rows P1 to P12: the cluster under three rates.

The rates are axis labels only in the paper. Here low, medium and high are 0.8, 1.0 and 1.2 times the
saturation rate (simulator/claims/saturation.py): "high" is to exceed the GPUs' capacity (figure 9), which a
trace of a few minutes from a cold start does not do at 1.0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from simulator.claims.base import Experiment, Figures, Finding, Run
from simulator.claims.pascal import rows
from simulator.claims.pascal.judging import (
    judge_adaptive,
    judge_gain,
    judge_mixed,
    judge_no_migration,
    judge_regressions,
    judge_slo,
    judge_throughput,
    judge_transfer,
)
from simulator.claims.pascal.measure import serve
from simulator.claims.pascal.results import (
    ALPACA,
    ARENA,
    BEYOND,
    BEYOND_LOAD,
    HIGH,
    LOADS,
    MIXED,
    Results,
    run_name,
)

REQUESTS: Final = 3_000
SEEDS: Final = (1, 2, 3)
# Seconds of one core, on an idle machine of the kind that docs/claims-pascal.md names.
_COST_S: Final[Mapping[str, float]] = {
    "fcfs": 2.0,
    "rr": 2.0,
    "pascal": 4.0,
    "no_migration": 3.0,
    "non_adaptive": 5.0,
}
_BASELINES: Final = ("fcfs", "rr", "pascal")


def _cells() -> Sequence[tuple[str, str, str]]:
    cells = [(dataset, arm, level) for dataset in (ALPACA, ARENA) for arm in _BASELINES for level in LOADS]
    cells += [(ALPACA, arm, HIGH) for arm in ("no_migration", "non_adaptive")]
    cells += [(MIXED, arm, HIGH) for arm in _BASELINES]
    cells += [(ALPACA, arm, BEYOND) for arm in ("no_migration", "pascal")]
    return cells


def _runs() -> tuple[Run, ...]:
    return tuple(
        Run(
            run_name(dataset, arm, level, seed),
            serve,
            (dataset, arm, {**LOADS, BEYOND: BEYOND_LOAD}[level], REQUESTS, seed),
            _COST_S[arm],
        )
        for dataset, arm, level in _cells()
        for seed in SEEDS
    )


def judge(figures: Mapping[str, Figures]) -> Sequence[Finding]:
    """P1 to P12, from all runs."""
    results = Results(figures, SEEDS)
    return (
        judge_gain(rows.P1, results, {ALPACA: -0.61}, "fcfs"),
        judge_gain(rows.P2, results, {ARENA: -0.72}, "fcfs"),
        judge_gain(rows.P3, results, {ALPACA: -0.33, ARENA: -0.29}, "rr"),
        judge_regressions(rows.P4, results),
        judge_slo(rows.P5, results),
        judge_throughput(rows.P6, results),
        judge_transfer(rows.P7, results),
        judge_no_migration(rows.P8, results),
        *judge_adaptive(rows.P9, rows.P10, results),
        judge_mixed(rows.P11, results, "fcfs", -0.70, 0.068),
        judge_mixed(rows.P12, results, "rr", -0.139, 0.077),
    )


_CLAIMS: Final = (
    rows.P1,
    rows.P2,
    rows.P3,
    rows.P4,
    rows.P5,
    rows.P6,
    rows.P7,
    rows.P8,
    rows.P9,
    rows.P10,
    rows.P11,
    rows.P12,
)

SERVING: Final = Experiment("pascal-serving", _CLAIMS, _runs(), judge)
