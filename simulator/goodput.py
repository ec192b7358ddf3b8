"""Service levels and what is measured by them: attainment and goodput."""

from __future__ import annotations

from collections.abc import Sequence

from simulator.records import RequestRecord
from tailrace.slo import Slo


def attainment(records: Sequence[RequestRecord], slo: Slo) -> float:
    """Share of the requests that met the SLO, from 0 to 1. Raises ValueError for no requests."""
    if not records:
        raise ValueError("no requests: no attainment")
    return sum(slo.met_by(record) for record in records) / len(records)


def offered_rate_per_s(records: Sequence[RequestRecord]) -> float:
    """Requests that arrived a second, from the first arrival to the last; 0.0 for a single moment."""
    arrivals = [record.arrival_s for record in records]
    span_s = max(arrivals) - min(arrivals)
    return (len(records) - 1) / span_s if span_s > 0.0 else 0.0


def goodput_per_s(records: Sequence[RequestRecord], slo: Slo) -> float:
    """Requests that met the SLO a second: the offered rate times the attainment.

    Of what arrived in a stretch of time, whenever it ended; a run's drain after the last arrival therefore
    does not lower it, and a queue that builds up shows in the attainment.
    """
    return offered_rate_per_s(records) * attainment(records, slo)
