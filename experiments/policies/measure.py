"""Measure one policy on one ground, without what fills the fleet at first and what it drains at last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from experiments.policies.grounds import GROUNDS, Case, scenario_of
from simulator.records import RequestRecord
from simulator.scenario import figures_of, simulated

# Shares of the arrivals between which requests are counted.
COUNTED: Final = (0.2, 0.95)
# Contestants of which one decides what the capacity of a ground is, and the share of requests in SLO.
PACEMAKERS: Final = ("least_loaded+earliest_due", "tailrace")
TARGET: Final = 0.9
_BISECTIONS: Final = 4
# Seeds of runs are below it.
_SEARCH_SEED: Final = 1_000


def measure(case: Case, traces: Path | None, seconds: float, seeds: int) -> dict[str, float]:
    """Return the figures of the counted requests; times in seconds."""
    scenario = scenario_of(case, traces, seconds, seeds)
    result = simulated(scenario)
    arrived = sorted(result.requests, key=lambda r: r.arrival_s)
    first, last = (int(share * len(arrived)) for share in COUNTED)
    counted = arrived[first:last]
    figures = figures_of(replace(result, requests=counted), scenario.slo)
    found = {name: float(value) for name, value in figures.as_dict().items()}
    for length, of in (("prompt", lambda r: r.prompt_tokens), ("output", lambda r: r.output_tokens)):
        for quarter, ttft_s in enumerate(ttft_p99_by_quartile(counted, of), 1):
            found[f"ttft_p99_{length}_q{quarter}_s"] = ttft_s
    return found


def ttft_p99_by_quartile(
    requests: Sequence[RequestRecord], length: Callable[[RequestRecord], int]
) -> list[float]:
    """Return P99 TTFT of each quarter of the requests, by length."""
    done = sorted((length(r), r.ttft_s) for r in requests if r.ttft_s is not None)
    return [
        float(np.percentile([ttft_s for _, ttft_s in quarter], 99)) if len(quarter) else float("nan")
        for quarter in (done[len(done) * n // 4 : len(done) * (n + 1) // 4] for n in range(4))
    ]


def capacity_per_s(ground: str, traces: Path | None, seconds: float) -> dict[str, float]:
    """Return as `per_s` the highest rate, by bisection, at which one of PACEMAKERS keeps the SLOs of TARGET
    of the requests. Raise ValueError if neither does at the ground's least rate."""

    def holds(rate_per_s: float) -> bool:
        cases = (Case(ground, policy, rate_per_s, _SEARCH_SEED) for policy in PACEMAKERS)
        return any(measure(case, traces, seconds, 1)["attainment"] >= TARGET for case in cases)

    low = GROUNDS[ground].least_rate_per_s
    if not holds(low):
        raise ValueError(f"{ground}: nobody keeps the SLOs at {low:g} requests/s")
    while holds(2.0 * low):
        low *= 2.0
    high = 2.0 * low
    for _ in range(_BISECTIONS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    return {"per_s": low}
