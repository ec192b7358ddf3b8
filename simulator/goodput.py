"""Measures of service levels: SLO attainment and goodput."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from simulator.records import RequestRecord
from tailrace.slo import Slo


def attainment(records: Sequence[RequestRecord], slo: Slo) -> float:
    """Return the share of requests that met the SLO, from 0 to 1. Raise ValueError without requests."""
    if not records:
        raise ValueError("no requests: no attainment")
    return sum(slo.met_by(record) for record in records) / len(records)


def offered_rate_per_s(records: Sequence[RequestRecord]) -> float:
    """Return the arrivals per second, from the first to the last; NaN if all arrive at one moment."""
    arrivals = [record.arrival_s for record in records]
    span_s = max(arrivals) - min(arrivals)
    return (len(records) - 1) / span_s if span_s > 0.0 else math.nan


def goodput_per_s(records: Sequence[RequestRecord], slo: Slo) -> float:
    """Return the goodput: the offered rate times the attainment, in requests per second.

    It counts requests by arrival, whenever they end. A run's drain after the last arrival therefore does not
    lower it, and a growing queue shows in the attainment.
    """
    return offered_rate_per_s(records) * attainment(records, slo)


BIN_TOKENS: Final = 256
# Percentiles by the size of a bin: none below 5 requests, the maximum below 10, P90 below 20, P95 below 100,
# else P99.
_PERCENTILES: Final = ((5, None), (10, 100.0), (20, 90.0), (100, 95.0))


def percentile_for(count: int) -> float | None:
    """Return the percentile that represents the tail of `count` requests (the rule of PASCAL's figure 10), or
    None for too few."""
    for below, percentile in _PERCENTILES:
        if count < below:
            return percentile
    return 99.0


def tail_by_bin(points: Iterable[tuple[int, float]]) -> dict[int, float]:
    """Return the tail by bin of (length in tokens, seconds)."""
    bins: dict[int, list[float]] = {}
    for length, seconds in points:
        bins.setdefault(length // BIN_TOKENS, []).append(seconds)
    tails: dict[int, float] = {}
    for index, inside in sorted(bins.items()):
        percentile = percentile_for(len(inside))
        if percentile is not None:
            tails[index * BIN_TOKENS] = float(np.percentile(inside, percentile))
    return tails
