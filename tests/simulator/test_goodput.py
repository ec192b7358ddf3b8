"""Service levels, goodput, and tails by reasoning length."""

from __future__ import annotations

import pytest

from simulator.goodput import attainment, goodput_per_s, offered_rate_per_s, percentile_for, tail_by_bin
from simulator.records import RequestRecord
from tailrace.slo import Slo


def record(
    n: int,
    *,
    ttft_s: float | None = 1.0,
    tpot_s: float | None = 0.05,
    qoe: float | None = 1.0,
    reasoning: int = 0,
    arrival_s: float | None = None,
) -> RequestRecord:
    """Return a record with the fields that matter here."""
    arrival = float(n) if arrival_s is None else arrival_s
    return RequestRecord(
        request_id=f"r{n}",
        arrival_s=arrival,
        prompt_tokens=10,
        reasoning_tokens=reasoning,
        answer_tokens=10,
        refused="",
        placements=(),
        first_token_s=None,
        first_answer_s=None,
        finish_s=None,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        qoe=qoe,
        migrations=0,
        pause_s=0.0,
        preemptions_swapped=0,
        preemptions_recomputed=0,
        answer_blocking_s=None,
        queue_s=None,
    )


@pytest.mark.parametrize(
    ("slo", "fields", "met"),
    [
        (Slo(1.0, 0.1), {"ttft_s": 1.0, "tpot_s": 0.1}, True),
        (Slo(1.0, 0.1), {"ttft_s": 1.01}, False),
        (Slo(1.0, 0.1), {"tpot_s": 0.11}, False),
        (Slo(1.0, 0.1), {"ttft_s": None}, False),
        (Slo(None, 0.1), {"ttft_s": 99.0}, True),
        (Slo(1.0, None), {"tpot_s": 99.0}, True),
        (Slo(None, None, 0.95), {"ttft_s": 99.0, "tpot_s": 99.0, "qoe": 0.95}, True),
        (Slo(None, None, 0.95), {"qoe": 0.94}, False),
        # 1 s plus 100 tokens of 0.1 s each.
        (Slo(1.0, 0.1), {"ttft_s": 10.9, "reasoning": 100}, True),
        (Slo(1.0, 0.1), {"ttft_s": 11.1, "reasoning": 100}, False),
        (Slo(1.0, None), {"ttft_s": 1.1, "reasoning": 100}, False),
    ],
)
def test_an_slo_is_met_within_its_limits(slo: Slo, fields: dict[str, float], met: bool) -> None:
    assert slo.met_by(record(0, **fields)) is met  # type: ignore[arg-type]


def test_goodput_is_rate_times_attainment() -> None:
    records = [record(n, ttft_s=1.0 if n % 4 else 9.0, arrival_s=n * 0.5) for n in range(9)]
    assert offered_rate_per_s(records) == 2.0
    assert attainment(records, Slo()) == pytest.approx(6 / 9)
    assert goodput_per_s(records, Slo()) == pytest.approx(2.0 * 6 / 9)


def test_no_requests_have_no_attainment() -> None:
    with pytest.raises(ValueError, match="no requests"):
        attainment([], Slo())


def test_slos_are_described_in_words() -> None:
    assert Slo(2.0, 0.15).describe() == "TTFT within 2 s + 0.15 s a reasoning token, TPOT within 0.15 s"
    assert Slo(None, None, 0.95).describe() == "QoE of at least 0.95"


@pytest.mark.parametrize(
    ("count", "percentile"),
    [(4, None), (5, 100.0), (9, 100.0), (10, 90.0), (19, 90.0), (20, 95.0), (99, 95.0), (100, 99.0)],
)
def test_the_tail_percentile_depends_on_the_count(count: int, percentile: float | None) -> None:
    assert percentile_for(count) == percentile


def test_tail_by_length() -> None:
    points = [(300, float(n)) for n in range(6)]
    # Too few for a bin.
    points += [(10, 1.0) for _ in range(4)]
    assert tail_by_bin(points) == {256: 5.0}
