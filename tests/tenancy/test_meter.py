"""What a tenant may take: never more than its limits, and what is refused may come back when it was told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.tenancy.keys import Tenant
from tailrace.tenancy.meter import LimitExceeded, Meter


def tenant(**limits: float) -> Tenant:
    return Tenant(name="t", **limits)  # type: ignore[arg-type]


@given(st.integers(1, 50), st.lists(st.floats(0, 20), max_size=200))
def test_no_minute_has_more_than_two_minutes_worth_of_requests(limit: int, gaps: list[float]) -> None:
    """A bucket: a whole minute's worth may be saved up, and as much comes in meanwhile."""
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
def test_no_stretch_of_time_has_more_than_its_share_and_a_burst(
    limit: int, burst_s: int, gaps: list[float], stretch_s: float
) -> None:
    meter, now_s = Meter(), 0.0
    own = tenant(requests_per_minute=float(limit), burst_seconds=float(burst_s))
    admitted: list[float] = []
    for gap in gaps:
        now_s += gap
        # Ten times what the limit allows, from one arrival to the next at the latest.
        for _ in range(10 * limit):
            if meter.begin(own, now_s) is not None:
                break
            admitted.append(now_s)
            meter.end(own)
    for begin in admitted:
        count = sum(begin <= each < begin + stretch_s for each in admitted)
        assert count <= (burst_s + stretch_s) * limit / 60 + 1e-6


def test_a_burst_is_saved_up_at_the_rate() -> None:
    meter, own = Meter(), tenant(requests_per_minute=60.0, burst_seconds=5.0)
    assert [meter.begin(own, 0.0) is None for _ in range(7)] == 5 * [True] + 2 * [False]
    assert [meter.begin(own, 2.0) is None for _ in range(3)] == 2 * [True] + [False]
    assert [meter.begin(own, 1000.0) is None for _ in range(7)] == 5 * [True] + 2 * [False]


def test_a_token_quota_is_saved_up_for_the_same_time() -> None:
    meter, own = Meter(), tenant(tokens_per_minute=600.0, burst_seconds=6.0)
    meter.charge(own, 60, 0.0)
    assert meter.begin(own, 0.0) is not None
    # However long it was idle, it has no more than six seconds' worth.
    meter.charge(own, 60, 1000.0)
    assert meter.begin(own, 1000.0) is not None
    assert meter.begin(own, 1001.0) is None


def test_less_than_one_request_a_minute() -> None:
    meter, own = Meter(), tenant(requests_per_minute=0.5)
    assert meter.begin(own, 0.0) is None
    assert meter.begin(own, 0.0) == LimitExceeded("more than 0.5 requests per minute", 120)
    assert meter.begin(own, 119.0) is not None
    assert meter.begin(own, 120.0) is None


def test_asking_whether_a_request_is_refused_counts_nothing() -> None:
    meter, own = Meter(), tenant(requests_per_minute=1.0, concurrency=1)
    assert all(meter.refusal(own, 0.0) is None for _ in range(3))
    assert meter.begin(own, 0.0) is None
    assert meter.running(own) == 1
    assert meter.refusal(own, 0.0) == meter.begin(own, 0.0)


@given(st.floats(0.5, 100), st.integers(1, 120))
def test_who_comes_back_when_told_is_let_in(limit: float, tries: int) -> None:
    meter, own = Meter(), tenant(requests_per_minute=limit)
    for _ in range(tries):
        if (excess := meter.begin(own, 0.0)) is not None:
            assert meter.begin(own, float(excess.retry_after_s)) is None
            return
    assert tries <= max(1.0, limit)


@given(st.lists(st.booleans(), max_size=100), st.integers(1, 5))
def test_so_many_at_a_time(begins: list[bool], limit: int) -> None:
    meter, own = Meter(), tenant(concurrency=limit)
    for begin in begins:
        if begin:
            admitted = meter.begin(own, 0.0) is None
            assert admitted or meter.running(own) == limit
        elif meter.running(own):
            meter.end(own)
        assert 0 <= meter.running(own) <= limit


def test_tokens_are_charged_afterwards_and_made_up_for() -> None:
    meter, own = Meter(), tenant(tokens_per_minute=600.0)
    assert meter.begin(own, 0.0) is None
    # More than there was: nobody knew how long the answer would be.
    meter.charge(own, 1200, 0.0)
    excess = meter.begin(own, 0.0)
    assert excess == LimitExceeded("more than 600 tokens per minute", 61)
    assert meter.begin(own, 59.0) is not None
    assert meter.begin(own, 61.0) is None


def test_one_tenant_does_not_touch_another() -> None:
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
def test_a_small_rate_still_lets_one_in(limits: dict[str, float]) -> None:
    assert Meter().begin(tenant(**limits), 0.0) is None
