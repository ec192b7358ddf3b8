"""Service levels and what is measured by them: attainment and goodput."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from simulator.records import RequestRecord


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request must keep to count as good; None: not asked for.

    The first answering token of a request that reasons is due `ttft_s` after its submission, and later by
    `tpot_s` for each token that it reasons: the time by which a plain answer of that length would have got
    so far. Without `tpot_s` it is due at `ttft_s` all the same.
    """

    ttft_s: float | None = 2.0
    tpot_s: float | None = 0.15
    # Least QoE of the answer; PASCAL asks for 0.95 and nothing else (section V-A).
    qoe: float | None = None

    def met_by(self, record: RequestRecord) -> bool:
        """Whether the request kept all of it. One that was refused did not."""
        if record.ttft_s is None or record.tpot_s is None or record.qoe is None:
            return False
        if self.ttft_s is not None and record.ttft_s > self.ttft_s + self._reasoning_s(record):
            return False
        if self.tpot_s is not None and record.tpot_s > self.tpot_s:
            return False
        return self.qoe is None or record.qoe >= self.qoe

    def words(self) -> str:
        """For a reader."""
        parts = []
        if self.ttft_s is not None:
            later = f" + {self.tpot_s:g} s a reasoning token" if self.tpot_s is not None else ""
            parts.append(f"TTFT within {self.ttft_s:g} s{later}")
        if self.tpot_s is not None:
            parts.append(f"TPOT within {self.tpot_s:g} s")
        if self.qoe is not None:
            parts.append(f"QoE of at least {self.qoe:g}")
        return ", ".join(parts) or "finished"

    def _reasoning_s(self, record: RequestRecord) -> float:
        return 0.0 if self.tpot_s is None else self.tpot_s * record.reasoning_tokens


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
