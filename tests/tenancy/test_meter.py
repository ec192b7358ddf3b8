"""Metering of tenants: limits are never exceeded, and a retry after the stated time is admitted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.tenancy.keys import Tenant
from tailrace.tenancy.meter import LimitExceeded, Meter


def tenant(**limits: float) -> Tenant:
    return Tenant(name="t", **limits)  # type: ignore[arg-type]


@given(st.integers(1, 50), st.lists(st.floats(0, 20), max_size=200))
def test_no_minute_exceeds_two_minutes_worth_of_requests(limit: int, gaps: list[float]) -> None:
    """Token bucket: up to a minute's worth accumulates, and as much is added during the minute."""
    meter, own, now_s = Meter(), tenant(requests_per_minute=float(limit)), 0.0
    admitted: list[float] = []
    for gap in gaps:
        now_s += gap
        if meter.begin(own, now_s) is None:
            admitted.append(now_s)
            meter.end(own)
    for begin in admitted:
        assert sum(begin <= each < begin + 60.0 for each in admitted) <= 2 * limit


@given(
    st.integers(60, 600),
    st.integers(1, 60),
    st.lists(st.floats(0, 20), max_size=200),
    st.sampled_from([1.0, 10.0, 60.0]),
)
def test_no_interval_exceeds_its_share_and_a_burst(
    limit: int, burst_s: int, gaps: list[float], stretch_s: float
) -> None:
    meter, now_s = Meter(), 0.0
    own = tenant(requests_per_minute=float(limit), burst_seconds=float(burst_s))
    admitted: list[float] = []
    for gap in gaps:
        now_s += gap
        # Up to ten times the limit at each arrival.
        for _ in range(10 * limit):
            if meter.begin(own, now_s) is not None:
                break
            admitted.append(now_s)
            meter.end(own)
    for begin in admitted:
        count = sum(begin <= each < begin + stretch_s for each in admitted)
        assert count <= (burst_s + stretch_s) * limit / 60 + 1e-6


def test_burst_credit_accumulates_at_the_rate() -> None:
    meter, own = Meter(), tenant(requests_per_minute=60.0, burst_seconds=5.0)
    assert [meter.begin(own, 0.0) is None for _ in range(7)] == 5 * [True] + 2 * [False]
    assert [meter.begin(own, 2.0) is None for _ in range(3)] == 2 * [True] + [False]
    assert [meter.begin(own, 1000.0) is None for _ in range(7)] == 5 * [True] + 2 * [False]


def test_token_credit_accumulates_for_the_same_time() -> None:
    meter, own = Meter(), tenant(tokens_per_minute=600.0, burst_seconds=6.0)
    meter.charge(own, 60, 0.0)
    assert meter.begin(own, 0.0) is not None
    # After any idle time, the credit is at most six seconds' worth.
    meter.charge(own, 60, 1000.0)
    assert meter.begin(own, 1000.0) is not None
    assert meter.begin(own, 1001.0) is None


def test_rate_below_one_request_per_minute() -> None:
    meter, own = Meter(), tenant(requests_per_minute=0.5)
    assert meter.begin(own, 0.0) is None
    assert meter.begin(own, 0.0) == LimitExceeded("more than 0.5 requests per minute", 120)
    assert meter.begin(own, 119.0) is not None
    assert meter.begin(own, 120.0) is None


def test_refusal_check_counts_nothing() -> None:
    meter, own = Meter(), tenant(requests_per_minute=1.0, concurrency=1)
    assert all(meter.refusal(own, 0.0) is None for _ in range(3))
    assert meter.begin(own, 0.0) is None
    assert meter.running(own) == 1
    assert meter.refusal(own, 0.0) == meter.begin(own, 0.0)


@given(st.floats(0.5, 100), st.integers(1, 120))
def test_retry_after_the_stated_time_is_admitted(limit: float, tries: int) -> None:
    meter, own = Meter(), tenant(requests_per_minute=limit)
    for _ in range(tries):
        if (excess := meter.begin(own, 0.0)) is not None:
            assert meter.begin(own, float(excess.retry_after_s)) is None
            return
    assert tries <= max(1.0, limit)


@given(st.lists(st.booleans(), max_size=100), st.integers(1, 5))
def test_concurrent_requests_are_limited(begins: list[bool], limit: int) -> None:
    meter, own = Meter(), tenant(concurrency=limit)
    for begin in begins:
        if begin:
            admitted = meter.begin(own, 0.0) is None
            assert admitted or meter.running(own) == limit
        elif meter.running(own):
            meter.end(own)
        assert 0 <= meter.running(own) <= limit


def test_tokens_are_charged_afterwards_and_paid_back() -> None:
    meter, own = Meter(), tenant(tokens_per_minute=600.0)
    assert meter.begin(own, 0.0) is None
    # More than the quota: the answer's length was not known in advance.
    meter.charge(own, 1200, 0.0)
    excess = meter.begin(own, 0.0)
    assert excess == LimitExceeded("more than 600 tokens per minute", 61)
    assert meter.begin(own, 59.0) is not None
    assert meter.begin(own, 61.0) is None


def test_tenants_are_metered_separately() -> None:
    meter = Meter()
    greedy, other = (Tenant(name=name, requests_per_minute=1.0, concurrency=1) for name in ("a", "b"))
    assert meter.begin(greedy, 0.0) is None
    assert meter.begin(greedy, 0.0) is not None
    assert meter.begin(other, 0.0) is None


def test_without_limits_nothing_is_refused() -> None:
    meter, own = Meter(), tenant()
    assert all(meter.begin(own, 0.0) is None for _ in range(1000))
    meter.charge(own, 10**9, 0.0)
    assert meter.begin(own, 0.0) is None


@pytest.mark.parametrize("limits", [{"requests_per_minute": 0.5}, {"requests_per_minute": 1.0}])
def test_small_rate_admits_one_request(limits: dict[str, float]) -> None:
    assert Meter().begin(tenant(**limits), 0.0) is None
