"""Tail TTFT by reasoning length, by the rule of PASCAL's figure 10."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np

from simulator.records import RequestRecord

BIN_TOKENS: Final = 256
# The maximum of fewer than 10 requests, P90 of fewer than 20, P95 of fewer than 100, else P99; fewer than 5
# are left out.
_RULE: Final = ((5, None), (10, 100.0), (20, 90.0), (100, 95.0))


def percentile_for(count: int) -> float | None:
    """The percentile that stands for the tail of `count` requests; None: too few."""
    for below, percentile in _RULE:
        if count < below:
            return percentile
    return 99.0


def tail_ttft_by_bin(records: Iterable[RequestRecord]) -> dict[int, float]:
    """Tail TTFT in seconds by the first reasoning length of each bin of 256 tokens, ascending."""
    return tail_by_bin((r.reasoning_tokens, r.ttft_s) for r in records if r.ttft_s is not None)


def tail_by_bin(points: Iterable[tuple[int, float]]) -> dict[int, float]:
    """The same of (length in tokens, seconds)."""
    bins: dict[int, list[float]] = {}
    for length, seconds in points:
        bins.setdefault(length // BIN_TOKENS, []).append(seconds)
    tails: dict[int, float] = {}
    for index, inside in sorted(bins.items()):
        percentile = percentile_for(len(inside))
        if percentile is not None:
            tails[index * BIN_TOKENS] = float(np.percentile(inside, percentile))
    return tails
