"""Figures of one run: tails by reasoning length, attainment, pauses, and the number of equal answers."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from experiments.live.vllm.chat import Timing
from experiments.live.vllm.load import Outcome
from experiments.live.vllm.observe import Observations
from tests.harness.loadgen import percentile

# PASCAL's SLO (section III): QoE of the answer at the reader's pace.
QOE_SLO: Final = 0.95
# Upper bounds of the bins of reasoning tokens; the last bin is open.
BINS: Final = (256, 768)


@dataclass(slots=True)
class Figures:
    """Figures of one contestant under one load; times in seconds."""

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
    # The longest stall of a stream during which a pool flipped; 0: no stream stalled then.
    flip_stall_s: float
    migrations: dict[str, int]
    aborted: int
    pause_ms_max: float
    offers_taken: int
    offers_kept: int
    more: dict[str, float] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether every answer arrived and equals the undisturbed one."""
        return self.equal == self.requests


def meets_qoe_slo(timing: Timing) -> bool:
    """Return whether PASCAL's SLO is met."""
    return timing.qoe >= QOE_SLO


def figures(
    contestant: str,
    seed: int,
    outcomes: Sequence[Outcome],
    observed: Observations,
    seconds: float,
    meets_slo: Callable[[Timing], bool] = meets_qoe_slo,
) -> Figures:
    """Aggregate a run."""
    timed = [(o.question.thought_tokens, o.timing) for o in outcomes if o.timing is not None]
    timings = [timing for _, timing in timed]
    counts = observed.counts
    assert counts is not None
    committed = observed.committed()
    return Figures(
        contestant=contestant,
        seed=seed,
        requests=len(outcomes),
        equal=sum(o.equal for o in outcomes),
        failed=[f"{o.question.prompt}: {o.error}" for o in outcomes if not o.equal],
        attained=sum(meets_slo(timing) for timing in timings),
        seconds=seconds,
        ttft_p50_s=percentile([t.ttft_s for t in timings], 0.5),
        ttft_p90_s=percentile([t.ttft_s for t in timings], 0.9),
        first_p50_s=percentile([t.first_token_s for t in timings], 0.5),
        first_p90_s=percentile([t.first_token_s for t in timings], 0.9),
        ttft_by_reasoning=_ttft_by_bin(timed),
        qoe_mean=statistics.fmean(t.qoe for t in timings) if timings else 0.0,
        longest_gap_s=max((t.longest_gap_s for t in timings), default=0.0),
        gap_p50_s=percentile([t.longest_gap_s for t in timings], 0.5),
        kv_share_mean=statistics.fmean(observed.shares or [0.0]),
        kv_variance_mean=statistics.fmean(observed.variances or [0.0]),
        preemptions=counts.preemptions,
        swaps_out=counts.swaps_out,
        tokens=counts.tokens,
        flips=len(observed.flips),
        flip_stall_s=max(
            (
                end - begin
                for timing in timings
                for begin, end in timing.stalls
                if any(begin <= at_s <= end for at_s, *_ in observed.flips)
            ),
            default=0.0,
        ),
        migrations=committed,
        aborted=len(observed.migrations) - sum(committed.values()),
        pause_ms_max=max(observed.pauses_ms, default=0.0),
        offers_taken=counts.offers_taken,
        offers_kept=counts.offers_kept,
    )


def ratio(ours: float, theirs: float) -> float | None:
    """Return ours / theirs; None if theirs is 0."""
    return ours / theirs if theirs else None


def _ttft_by_bin(timed: Sequence[tuple[int, Timing]]) -> dict[str, tuple[int, float, float]]:
    found: dict[str, tuple[int, float, float]] = {}
    edges = [0, *BINS, None]
    for lo, hi in itertools.pairwise(edges):
        assert lo is not None
        inside = [t.ttft_s for n, t in timed if n >= lo and (hi is None or n < hi)]
        if inside:
            name = f"{lo}-{hi - 1}" if hi is not None else f"{lo}+"
            found[name] = (len(inside), statistics.fmean(inside), percentile(inside, 0.9))
    return found
