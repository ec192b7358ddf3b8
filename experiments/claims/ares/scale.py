"""Rows A6 and A7: 8 to 256 instances, a quarter of them for prefill, 25 Gbit/s, true lengths, RPS 0.3 for 8.

That is the paper's own operating point (section 6.4). Small clusters vary more by chance, so they run on more
seeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

from experiments.claims.ares.measure import serve_at_rate
from experiments.claims.ares.rows import A6, A7
from experiments.claims.ares.serving import SHAREGPT
from experiments.claims.base import QUICK, Effort, Experiment, Figures, Finding, Run
from experiments.claims.verdicts import judge_bound, judge_ordering, judged, number
from simulator.estimate import Estimate, estimate

_WHY: Final = (
    "rescheduling removes all but a hundredth of vLLM's variance: a check every second keeps current loads "
    "equal, and true lengths improve this little (~: less than the seeds distinguish)"
)
# Seeds by size.
SIZES: Final[Mapping[int, int]] = {8: 10, 16: 10, 32: 5, 64: 3, 128: 2, 256: 1}
_QUICK_SIZES: Final[Mapping[int, int]] = {8: 2, 16: 2, 32: 1}
RATE_PER_INSTANCE: Final = 0.3 / 8
# Enough for 3,000 s.
REQUESTS_PER_INSTANCE: Final = 112
_ARMS: Final = ("vllm", "rescheduling", "ares_oracle")


def sizes_of(effort: Effort) -> Mapping[int, int]:
    """Return the number of seeds for each size."""
    return _QUICK_SIZES if effort is QUICK else SIZES


def _name(size: int, arm: str, seed: int) -> str:
    return f"scale/{size}/{arm}/{seed}"


def _runs(effort: Effort) -> tuple[Run, ...]:
    return tuple(
        Run(
            _name(size, arm, seed),
            serve_at_rate,
            (SHAREGPT, arm, size, RATE_PER_INSTANCE * size, REQUESTS_PER_INSTANCE * size, seed),
            0.3 * size,
        )
        for size, seeds in sizes_of(effort).items()
        for seed in range(1, seeds + 1)
        for arm in _ARMS
    )


def judge(effort: Effort, figures: Mapping[str, Figures]) -> Sequence[Finding]:
    """Judge A6 and A7 from all runs."""
    sizes = sizes_of(effort)
    return (*judged((A6,), _orderings, sizes, figures), *judged((A7,), _ticks, sizes, figures))


def _orderings(sizes: Mapping[int, int], figures: Mapping[str, Figures]) -> Finding:
    held: list[bool] = []
    parts: list[str] = []
    out: dict[str, float] = {}
    spreads: dict[str, float] = {}
    for size, seeds in sizes.items():
        each = {
            arm: [number(figures[_name(size, arm, seed)], "variance_ms2") for seed in range(1, seeds + 1)]
            for arm in _ARMS
        }
        found = {arm: estimate(values) for arm, values in each.items()}
        vllm, moved, oracle = (found[arm].mean for arm in _ARMS)
        gap = estimate([a - b for a, b in zip(each["rescheduling"], each["ares_oracle"], strict=True)])
        held += [vllm > moved, gap.mean > 0.0]
        parts.append(f"{size}: {vllm:.1f} > {moved:.3f} {_sign(gap)} {oracle:.3f}")
        out |= {f"{arm}_{size}": e.mean for arm, e in found.items()}
        out[f"rescheduling_less_oracle_{size}"] = gap.mean
        spreads |= {f"{arm}_{size}": e.half_width for arm, e in found.items() if e.half_width is not None}
        if gap.half_width is not None:
            spreads[f"rescheduling_less_oracle_{size}"] = gap.half_width
    return Finding(A6.claim_id, "; ".join(parts), judge_ordering(held), _WHY, out, spreads)


def _ticks(sizes: Mapping[int, int], figures: Mapping[str, Figures]) -> Finding:
    largest = max(sizes)
    last = figures[_name(largest, "ares_oracle", 1)]
    mean_ms, max_ms = (number(last, f"tick_{name}_ms") for name in ("mean", "max"))
    return Finding(
        A7.claim_id,
        f"mean {mean_ms:.1f} ms, longest {max_ms:.0f} ms"
        + ("" if largest == max(SIZES) else f" (at {largest} instances)"),
        judge_bound(mean_ms, 300.0, 600.0),
        "targets and sources that cannot win are skipped; the time includes building the simulator's views",
        {"mean_ms": mean_ms, "max_ms": max_ms},
    )


def _sign(gap: Estimate) -> str:
    """Return how rescheduling compares to the oracle; `~` if the seeds do not distinguish them."""
    if gap.half_width is not None and abs(gap.mean) <= gap.half_width:
        return "~"
    return ">" if gap.mean > 0.0 else "<"


def scale_rows(effort: Effort) -> Experiment:
    """Return the experiment of rows A6 and A7."""
    return Experiment("ares-scale", (A6, A7), _runs(effort), partial(judge, effort))
