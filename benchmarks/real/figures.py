"""Figures of one run: tails by reasoning length, attainment, pauses, and how many answers were equal."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from benchmarks.loadgen import percentile
from benchmarks.real.chat import Timing
from benchmarks.real.load import Outcome
from benchmarks.real.watch import Watched

# PASCAL's SLO (section III): the answer's QoE at the reader's pace.
QOE_SLO: Final = 0.95
# Upper ends of the bins of reasoning tokens; the last is open.
BINS: Final = (256, 768)


@dataclass(slots=True)
class Figures:
    """One contestant, one load; times in seconds."""

    contestant: str
    seed: int
    requests: int
    equal: int
    failed: list[str]
    attained: int
    seconds: float
    ttft_p50_s: float
    ttft_p90_s: float
    # To the first token of any kind.
    first_p50_s: float
    first_p90_s: float
    # By bin of reasoning tokens: requests, mean, P90.
    ttft_by_reasoning: dict[str, tuple[int, float, float]]
    qoe_mean: float
    longest_gap_s: float
    gap_p50_s: float
    kv_share_mean: float
    kv_variance_mean: float
    preemptions: int
    swaps_out: int
    tokens: int
    flips: int
    # The longest stall of any stream during which a pool flipped; 0: no stream stalled then.
    flip_stall_s: float
    migrations: dict[str, int]
    aborted: int
    pause_ms_max: float
    offers_taken: int
    offers_kept: int
    more: dict[str, float] = field(default_factory=dict)

    @property
    def right(self) -> bool:
        """Every answer came, and was the undisturbed one."""
        return self.equal == self.requests


def by_qoe(timing: Timing) -> bool:
    """PASCAL's SLO."""
    return timing.qoe >= QOE_SLO


def figures(
    contestant: str,
    seed: int,
    outcomes: Sequence[Outcome],
    watched: Watched,
    seconds: float,
    attains: Callable[[Timing], bool] = by_qoe,
) -> Figures:
    """Sum a run up."""
    timed = [(o.asked.thought_tokens, o.timing) for o in outcomes if o.timing is not None]
    timings = [timing for _, timing in timed]
    counts = watched.counts
    assert counts is not None
    committed = watched.committed()
    return Figures(
        contestant=contestant,
        seed=seed,
        requests=len(outcomes),
        equal=sum(o.equal for o in outcomes),
        failed=[f"{o.asked.prompt}: {o.error}" for o in outcomes if not o.equal],
        attained=sum(attains(timing) for timing in timings),
        seconds=seconds,
        ttft_p50_s=percentile([t.ttft_s for t in timings], 0.5),
        ttft_p90_s=percentile([t.ttft_s for t in timings], 0.9),
        first_p50_s=percentile([t.first_token_s for t in timings], 0.5),
        first_p90_s=percentile([t.first_token_s for t in timings], 0.9),
        ttft_by_reasoning=_binned(timed),
        qoe_mean=statistics.fmean(t.qoe for t in timings) if timings else 0.0,
        longest_gap_s=max((t.longest_gap_s for t in timings), default=0.0),
        gap_p50_s=percentile([t.longest_gap_s for t in timings], 0.5),
        kv_share_mean=statistics.fmean(watched.shares or [0.0]),
        kv_variance_mean=statistics.fmean(watched.variances or [0.0]),
        preemptions=counts.preemptions,
        swaps_out=counts.swaps_out,
        tokens=counts.tokens,
        flips=len(watched.flips),
        flip_stall_s=max(
            (
                end - begin
                for timing in timings
                for begin, end in timing.stalls
                if any(begin <= at_s <= end for at_s, *_ in watched.flips)
            ),
            default=0.0,
        ),
        migrations=committed,
        aborted=len(watched.migrations) - sum(committed.values()),
        pause_ms_max=max(watched.pauses_ms, default=0.0),
        offers_taken=counts.offers_taken,
        offers_kept=counts.offers_kept,
    )


def ratio(ours: float, theirs: float) -> float | None:
    """ours / theirs; None where there is nothing to divide by."""
    return ours / theirs if theirs else None


def _binned(timed: Sequence[tuple[int, Timing]]) -> dict[str, tuple[int, float, float]]:
    found: dict[str, tuple[int, float, float]] = {}
    edges = [0, *BINS, None]
    for lo, hi in itertools.pairwise(edges):
        assert lo is not None
        inside = [t.ttft_s for n, t in timed if n >= lo and (hi is None or n < hi)]
        if inside:
            name = f"{lo}-{hi - 1}" if hi is not None else f"{lo}+"
            found[name] = (len(inside), statistics.fmean(inside), percentile(inside, 0.9))
    return found
