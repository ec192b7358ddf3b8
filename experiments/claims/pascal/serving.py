"""Rows P1 to P12: the cluster at three rates, and curves over eight.

In the paper the rates are only axis labels. The one figure that indicates its "high" rate is NonAdaptive's
share of violations, 7.45% (P9): with exact views our cluster comes nearest to it at 1.1 times the saturation
rate (experiments/claims/saturation.py). So high is 1.1, medium 0.8 and low 0.6; this number of P9 is thereby
an input, as are P7's in the lengths (simulator/workloads/pascal.py). The first quarter of the requests fills
the cluster and is not counted. For the rows that depend on the rate (P5, P8 to P10), the figures include the
curve from 0.6 to 1.35 with the spread at each point.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

from experiments.claims.base import WHOLE, Effort, Experiment, Figures, Finding, Run
from experiments.claims.pascal import rows
from experiments.claims.pascal.judging import (
    judge_adaptive,
    judge_gain,
    judge_mixed,
    judge_no_migration,
    judge_regressions,
    judge_slo,
    judge_throughput,
    judge_transfer,
)
from experiments.claims.pascal.measure import serve
from experiments.claims.pascal.results import (
    ALPACA,
    ARENA,
    BEYOND,
    HIGH,
    LEVELS,
    LOADS,
    MIXED,
    Results,
    run_name,
)
from experiments.claims.verdicts import judged

REQUESTS: Final = 4_000
SEEDS: Final = (1, 2, 3, 4, 5)
CURVE_SEEDS: Final = (1, 2, 3)
# Seconds on one core of an idle machine.
_COST_S: Final[Mapping[str, float]] = {
    "fcfs": 4.0,
    "rr": 4.0,
    "rr_circular": 4.0,
    "pascal": 8.0,
    "no_migration": 7.0,
    "non_adaptive": 9.0,
    "late_reports": 5.0,
}
_BASELINES: Final = ("fcfs", "rr", "pascal")
_CURVE_ARMS: Final = (*_BASELINES, "no_migration", "non_adaptive")


def _cells() -> Sequence[tuple[str, str, str]]:
    """Return the (dataset, scheduler, rate) cells of the paper's own figures."""
    cells = [(dataset, arm, level) for dataset in (ALPACA, ARENA) for arm in _BASELINES for level in LEVELS]
    cells += [(ALPACA, arm, HIGH) for arm in ("no_migration", "non_adaptive", "late_reports")]
    cells += [(MIXED, arm, HIGH) for arm in (*_BASELINES, "rr_circular")]
    cells += [(dataset, "rr_circular", HIGH) for dataset in (ALPACA, ARENA)]
    cells += [(ALPACA, arm, BEYOND) for arm in ("no_migration", "pascal")]
    return cells


def _runs(effort: Effort) -> tuple[Run, ...]:
    cells = {(*cell, seed): None for cell in _cells() for seed in effort.seeds(SEEDS)}
    if effort is WHOLE:
        cells |= {
            (ALPACA, arm, level, seed): None for arm in _CURVE_ARMS for level in LOADS for seed in CURVE_SEEDS
        }
    # All requests, even in a quick check: at a high rate memory fills up over the whole trace.
    return tuple(
        Run(
            run_name(dataset, arm, level, seed),
            serve,
            (dataset, arm, LOADS[level], REQUESTS, seed),
            _COST_S[arm],
        )
        for dataset, arm, level, seed in cells
    )


def judge(effort: Effort, figures: Mapping[str, Figures]) -> Sequence[Finding]:
    """Judge P1 to P12 from all runs."""
    results = Results(figures, effort.seeds(SEEDS))
    curves = Results(figures, effort.seeds(CURVE_SEEDS))
    return (
        *judged((rows.P1,), judge_gain, rows.P1, results, {ALPACA: -0.61}, "fcfs"),
        *judged((rows.P2,), judge_gain, rows.P2, results, {ARENA: -0.72}, "fcfs"),
        *judged((rows.P3,), judge_gain, rows.P3, results, {ALPACA: -0.33, ARENA: -0.29}, "rr"),
        *judged((rows.P4,), judge_regressions, rows.P4, results),
        *judged((rows.P5,), judge_slo, rows.P5, results, curves),
        *judged((rows.P6,), judge_throughput, rows.P6, results),
        *judged((rows.P7,), judge_transfer, rows.P7, results),
        *judged((rows.P8,), judge_no_migration, rows.P8, results, curves),
        *judged((rows.P9, rows.P10), judge_adaptive, rows.P9, rows.P10, results, curves),
        *judged((rows.P11,), judge_mixed, rows.P11, results, "fcfs", -0.70, 0.068),
        *judged((rows.P12,), judge_mixed, rows.P12, results, "rr", -0.139, 0.077),
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


def serving_rows(effort: Effort) -> Experiment:
    """Return the experiment of rows P1 to P12."""
    return Experiment("pascal-serving", _CLAIMS, _runs(effort), partial(judge, effort))
