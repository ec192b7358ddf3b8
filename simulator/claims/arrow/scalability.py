"""R9: attainment against the number of GPUs (section 7.4).

Neither the trace nor the rate is in the text: Azure Code, at the rate that half of eight instances prefill at
most, which is beyond what any of the smaller clusters sustains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np

from simulator.claims.arrow.cluster import (
    CODE,
    INSTANCES,
    MINIMAL_LOAD,
    PROFILE,
    SLO_AWARE,
    Trace,
    half_capacity_per_s,
    replay,
)
from simulator.claims.arrow.elsewhere import without_traces
from simulator.claims.base import Claim, Experiment, Figures, Finding, Run, Verdict
from simulator.claims.verdicts import number, of_ordering
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
# Share of the variance that a straight line explains from which on growth counts as near-linear.
_LINEAR: Final = 0.9
_NAME: Final = "arrow-scalability"


def scalability(traces: Path | None) -> Experiment:
    """Both schedulers at 2, 4, 6 and 8 GPUs."""
    if traces is None:
        return Experiment(_NAME, (R9,), (), without_traces((R9,)))
    runs = tuple(
        Run(f"{_NAME}/{policy}/{gpus}", attained, (str(traces), CODE, policy, gpus), 6.0)
        for policy in (SLO_AWARE, MINIMAL_LOAD)
        for gpus in GPUS
    )
    return Experiment(_NAME, (R9,), runs, judge)


def attained(traces: str, trace: Trace, policy: str, gpus: int) -> Figures:
    """Attainment at the unit of rates; half of the GPUs in each pool at the start. Raises WorkloadError."""
    workload = trace.load(Path(traces))
    rate_per_s = half_capacity_per_s(load_profile(PROFILE), workload)
    result = replay(trace, workload, policy, rate_per_s, gpus)
    return {"attainment": attainment(result.requests, trace.slo), "rate_per_s": rate_per_s}


def judge(figures: Mapping[str, Figures]) -> Sequence[Finding]:
    """Never below static pools, above them where there is anything to move, growing, and near a line."""
    aware = [_attainment(figures, SLO_AWARE, gpus) for gpus in GPUS]
    static = [_attainment(figures, MINIMAL_LOAD, gpus) for gpus in GPUS]
    # Of two instances neither can be moved.
    better = [a > s for a, s in zip(aware[1:], static[1:], strict=True)]
    growing = all(b > a for a, b in pairwise(aware))
    explained = float(np.corrcoef(GPUS, aware)[0, 1] ** 2) if growing else 0.0
    verdict = of_ordering([*better, growing, explained >= _LINEAR])
    return (
        Finding(
            R9.claim_id,
            "; ".join(
                f"{g} GPUs {a:.0%}, static {s:.0%}" for g, a, s in zip(GPUS, aware, static, strict=True)
            ),
            verdict if all(better) else Verdict.DOES_NOT_HOLD,
            f"a line explains {explained:.0%} of the growth; two instances leave nothing to move",
            {"gpus": list(GPUS), "slo_aware": aware, "minimal_load": static, "explained": explained},
        ),
    )


def _attainment(figures: Mapping[str, Figures], policy: str, gpus: int) -> float:
    return number(figures[f"{_NAME}/{policy}/{gpus}"], "attainment")
