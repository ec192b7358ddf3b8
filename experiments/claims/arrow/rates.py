"""The highest rate that a scheduler sustains: at which 90% of the requests meet their SLO (section 7.1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from experiments.claims.arrow.cluster import (
    AS_JUDGED,
    INSTANCES,
    PROFILE,
    Engines,
    Trace,
    half_capacity_per_s,
    replay,
    rotated,
)
from experiments.claims.base import Figures
from simulator.goodput import attainment
from simulator.records import SimResult
from tailrace.cluster import Pool
from tailrace.profiles import load_profile
from tailrace.slo import Slo

# The paper's target for SLO attainment.
TARGET: Final = 0.9
# Rates are half_capacity * 2**(n / STEPS), 19% apart to save time. They are bisected between these n, a
# quarter to twice that capacity; the paper names no rate.
STEPS: Final = 4
LOWEST, HIGHEST = -8, 4


def rate_at(unit_per_s: float, n: int) -> float:
    """Return the n-th rate of the scale."""
    return float(unit_per_s * 2.0 ** (n / STEPS))


def bisect(attained: Callable[[int], float]) -> dict[int, float]:
    """Return attainment by n, including neighbours on both sides of the target if there are any."""
    low, high = LOWEST, HIGHEST
    seen: dict[int, float] = {}
    while high - low > 1:
        middle = (low + high) // 2
        seen[middle] = attained(middle)
        if seen[middle] >= TARGET:
            low = middle
        else:
            high = middle
    for end in (low, high):
        if end not in seen:
            seen[end] = attained(end)
    return seen


def crossing(points: Mapping[float, float]) -> float:
    """Return the rate at which attainment, interpolated linearly by rate, first falls below the target.

    If all measured rates are on one side, return the nearest one.
    """
    rates = sorted(points)
    above = [rate for rate in rates if points[rate] >= TARGET]
    below = [rate for rate in rates if points[rate] < TARGET]
    if not above or not below:
        return rates[0] if not above else rates[-1]
    high = min(below)
    low = max((rate for rate in above if rate < high), default=high)
    if low == high:
        return high
    share = (points[low] - TARGET) / (points[low] - points[high])
    return low + share * (high - low)


def sustainable(
    traces: str, trace: Trace, policy: str, start: float = 0.0, engines: Engines = AS_JUDGED
) -> Figures:
    """Find the sustainable rate on eight instances, and report all rates tried with their attainment.

    `start` is the starting point in the trace as a share of its requests.

    `ttft_attainments` and `tpot_attainments` are for one half of the SLO each; `decoders` are the instances
    in a decoding pool at the end of each run. Raise WorkloadError.
    """
    workload = trace.load(Path(traces))
    unit_per_s = half_capacity_per_s(load_profile(PROFILE), workload)
    workload = rotated(workload, start)
    results: dict[int, SimResult] = {}

    def attained(n: int) -> float:
        results[n] = replay(trace, workload, policy, rate_at(unit_per_s, n), INSTANCES, engines)
        return attainment(results[n].requests, trace.slo)

    seen = dict(sorted(bisect(attained).items()))
    rates = [rate_at(unit_per_s, n) for n in seen]
    ordered = [results[n] for n in seen]
    return {
        "unit_per_s": unit_per_s,
        "sustainable_per_s": crossing(dict(zip(rates, seen.values(), strict=True))),
        "rates_per_s": rates,
        "attainments": list(seen.values()),
        "ttft_attainments": [attainment(r.requests, Slo(trace.slo.ttft_s, None)) for r in ordered],
        "tpot_attainments": [attainment(r.requests, Slo(None, trace.slo.tpot_s)) for r in ordered],
        "decoders": [float(_decoders(r)) for r in ordered],
    }


def _decoders(result: SimResult) -> int:
    pools = {change.instance_id: change.pool for change in result.series.pools}
    return sum(pool in (Pool.DECODE, Pool.PREFILL_TO_DECODE) for pool in pools.values())
