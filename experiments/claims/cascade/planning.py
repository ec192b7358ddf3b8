"""C12: the duration of planning (section 6.5)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

from experiments.claims.base import Claim, Experiment, Figures, Finding, Run, Verdict
from experiments.claims.cascade.cluster import INSTANCES, LINK_BYTES_PER_S, history, llama_on_h20
from experiments.claims.verdicts import number
from tailrace.perf.qoe_model import QoeModel
from tailrace.policy.cascade.planner import Costs, Plan, exact, heuristic
from tailrace.policy.cascade.workload import Workload, bucket_edges

C12 = Claim(
    "C12",
    "CascadeInfer",
    "section 6.5",
    "planning 16 instances x 128K tokens: heuristic, against the dynamic program over single tokens",
    "0.06 s, est. 51 h",
)
_NAME: Final = "cascade-planning"
_PAPER_S: Final = 0.06
_MAX_LENGTH: Final = 131_072
_TIMES: Final = 20


def planning() -> Experiment:
    """Return the experiment; its figures are durations, which vary between runs."""
    return Experiment(_NAME, (C12,), (Run(f"{_NAME}/all", timed, (), 3.0),), judge)


def timed() -> Figures:
    """Measure the median CPU seconds for the lengths of the history in flight, and the cost of each plan."""
    profile, lengths = llama_on_h20(), history()
    inputs, outputs = [row[0] for row in lengths], [row[1] for row in lengths]
    workload = Workload.of_history(bucket_edges(_MAX_LENGTH), inputs, outputs, 64.0 * INSTANCES)
    model, transfer_s = QoeModel.of_profile(profile), profile.kv_bytes_per_token / LINK_BYTES_PER_S
    figures: dict[str, float | Sequence[float]] = {}
    planners: dict[str, Callable[[Costs, int], Plan]] = {"heuristic": heuristic, "exact": exact}
    for name, planner in planners.items():
        seconds = []
        for _ in range(_TIMES):
            began_s = time.thread_time()
            plan = planner(Costs(workload, model, transfer_s), INSTANCES)
            seconds.append(time.thread_time() - began_s)
        figures |= {f"{name}_s": float(np.median(seconds)), f"{name}_cost": plan.cost}
        figures[f"{name}_stages"] = float(len(plan.counts))
    return figures


def judge(figures: Mapping[str, Figures]) -> Sequence[Finding]:
    """Judge C12: faster than the paper's heuristic, and exact."""
    ours = figures[f"{_NAME}/all"]
    quick, best = number(ours, "heuristic_s"), number(ours, "exact_s")
    worse = number(ours, "heuristic_cost") / number(ours, "exact_cost") - 1.0
    return (
        Finding(
            C12.claim_id,
            f"{quick * 1e3:.1f} ms heuristic, {best * 1e3:.1f} ms exact",
            Verdict.HOLDS if max(quick, best) <= _PAPER_S else Verdict.DOES_NOT_HOLD,
            "the optimum over the paper's buckets needs no heuristic: the dynamic program does not index the "
            f"number of stages, and its inner loop is in numpy. The heuristic's plan is {worse:.1%} worse",
            ours,
        ),
    )
