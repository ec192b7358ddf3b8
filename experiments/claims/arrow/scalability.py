"""R9: attainment against the number of GPUs (section 7.4).

The paper states neither the trace nor the rate. Used here: Azure Code at the highest rate that half of eight
instances can prefill, which none of the smaller clusters sustains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np

from experiments.claims.arrow.cluster import (
    CODE,
    INSTANCES,
    MINIMAL_LOAD,
    PROFILE,
    SLO_AWARE,
    Trace,
    half_capacity_per_s,
    replay,
)
from experiments.claims.arrow.not_checked import without_traces
from experiments.claims.base import Claim, Experiment, Figures, Finding, Run, Verdict
from experiments.claims.verdicts import judge_ordering, number
from simulator.goodput import attainment
from tailrace.profiles import load_profile

R9 = Claim(
    "R9",
    "Arrow",
    "Fig. 9",
    "attainment grows near-linearly with GPUs; static pools are the bottleneck",
    "ordering",
)
GPUS: Final = tuple(range(2, INSTANCES + 1, 2))
# Share of the variance explained by a straight line from which growth counts as near-linear.
_LINEAR: Final = 0.9
_NAME: Final = "arrow-scalability"


def scalability(traces: Path | None) -> Experiment:
    """Return the experiment with both schedulers at 2, 4, 6 and 8 GPUs."""
    if traces is None:
        return Experiment(_NAME, (R9,), (), without_traces((R9,)))
    runs = tuple(
        Run(f"{_NAME}/{policy}/{gpus}", attained, (str(traces), CODE, policy, gpus), 6.0)
        for policy in (SLO_AWARE, MINIMAL_LOAD)
        for gpus in GPUS
    )
    return Experiment(_NAME, (R9,), runs, judge)


def attained(traces: str, trace: Trace, policy: str, gpus: int) -> Figures:
    """Measure attainment at the unit of rates, starting with half of the GPUs in each pool. Raise
    WorkloadError."""
    workload = trace.load(Path(traces))
    rate_per_s = half_capacity_per_s(load_profile(PROFILE), workload)
    result = replay(trace, workload, policy, rate_per_s, gpus)
    return {"attainment": attainment(result.requests, trace.slo), "rate_per_s": rate_per_s}


def judge(figures: Mapping[str, Figures]) -> Sequence[Finding]:
    """Judge R9: never below static pools, above them if instances can be moved, growing, and near-linear."""
    aware = [_attainment(figures, SLO_AWARE, gpus) for gpus in GPUS]
    static = [_attainment(figures, MINIMAL_LOAD, gpus) for gpus in GPUS]
    # With two instances, neither can be moved.
    better = [a > s for a, s in zip(aware[1:], static[1:], strict=True)]
    growing = all(b > a for a, b in pairwise(aware))
    explained = float(np.corrcoef(GPUS, aware)[0, 1] ** 2) if growing else 0.0
    verdict = judge_ordering([*better, growing, explained >= _LINEAR])
    return (
        Finding(
            R9.claim_id,
            "; ".join(
                f"{g} GPUs {a:.0%}, static {s:.0%}" for g, a, s in zip(GPUS, aware, static, strict=True)
            ),
            verdict if all(better) else Verdict.DOES_NOT_HOLD,
            f"a line explains {explained:.0%} of the growth; with two instances there is nothing to move",
            {"gpus": list(GPUS), "slo_aware": aware, "minimal_load": static, "explained": explained},
        ),
    )


def _attainment(figures: Mapping[str, Figures], policy: str, gpus: int) -> float:
    return number(figures[f"{_NAME}/{policy}/{gpus}"], "attainment")
