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
    bins: dict[int, list[float]] = {}
    for record in records:
        if record.ttft_s is not None:
            bins.setdefault(record.reasoning_tokens // BIN_TOKENS, []).append(record.ttft_s)
    tails: dict[int, float] = {}
    for index, ttft_s in sorted(bins.items()):
        percentile = percentile_for(len(ttft_s))
        if percentile is not None:
            tails[index * BIN_TOKENS] = float(np.percentile(ttft_s, percentile))
    return tails
