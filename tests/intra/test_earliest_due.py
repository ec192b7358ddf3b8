"""The earliest-due order: ranks, preemption, and absence of starvation."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.cluster import Phase
from tailrace.intra.allocate import Claim, Grants, Room, allocate
from tailrace.intra.base import JobView, TokenIntervals
from tailrace.intra.earliest_due import LATE_S, LEAD_S, RANK_TOKENS, EarliestDue, due_s, nominal_s
from tailrace.slo import DEFAULT_TPOT_S

TTFT_S, PACE_S = 2.0, 0.1
POLICY = EarliestDue(ttft_slo_s=TTFT_S, pace_s=PACE_S, watermark=0.0)


def prompt(arrival: int, arrived_s: float, tokens: int = 200, *, lapsed: bool = False) -> JobView:
    return JobView(arrival, Phase.PREFILL, tokens, 0, 0, arrived_s, 0.0, 0.0, lapsed)


def answer(arrival: int, answering_s: float, tokens: int) -> JobView:
    return JobView(arrival, Phase.ANSWERING, 200, tokens, tokens, answering_s - 1.0, 0.0, answering_s)


def reasoning(arrival: int, arrived_s: float, tokens: int) -> JobView:
    return JobView(arrival, Phase.REASONING, 200, tokens, tokens, arrived_s)


@st.composite
def claims(draw: st.DrawFn, first: int, *, waiting: bool) -> list[Claim[int]]:
    drawn: list[Claim[int]] = []
    for number in range(draw(st.integers(0, 8))):
        at_s, output = draw(st.integers(0, 60)), draw(st.integers(1, 900))
        makes = [prompt(number, at_s), answer(number, at_s, output), reasoning(number, at_s, output)]
        job = replace(draw(st.sampled_from(makes)), arrival=first + number)
        computes = job.prompt_tokens if waiting and job.phase is Phase.PREFILL else 0
        drawn.append(Claim(POLICY.rank(job), first + number, draw(st.integers(1, 6)), computes))
    return drawn


def jobs_in_due_order() -> list[JobView]:
    return [
        answer(3, 100.0, 100),  # its next token is read at 110 s
        prompt(1, 111.0),
        reasoning(2, 100.0, 150),  # on time until 117 s
        answer(0, 100.0, 400),
        prompt(4, 100.0, lapsed=True),  # lapsed: due a minute later
    ]


def test_jobs_are_ranked_by_due_time() -> None:
    jobs = jobs_in_due_order()
    assert sorted(jobs, key=POLICY.rank) == jobs


@given(running=claims(0, waiting=False), waiting=claims(100, waiting=True), spare=st.integers(0, 6))
def test_allocation_equals_a_direct_implementation(
    running: list[Claim[int]], waiting: list[Claim[int]], spare: int
) -> None:
    waiting = sorted(waiting)
    total = max(spare + sum(claim.blocks for claim in running), 6)
    free = total - sum(claim.blocks for claim in running)
    grants: Grants[int] = allocate(POLICY, lambda: running, waiting, Room(total, free, 64, 1 << 20))
    # In queue order; victims are the running ones furthest ahead.
    left = list(running)
    preempted: list[int] = []
    admitted: list[int] = []
    for claim in waiting:
        victims: list[Claim[int]] = []
        ahead = sorted(
            (other for other in left if other.rank[1] and other.rank[0] > claim.rank[0] + LEAD_S * 1e6),
            reverse=True,
        )
        while free + sum(victim.blocks for victim in victims) < claim.blocks and ahead:
            victims.append(ahead.pop(0))
        if free + sum(victim.blocks for victim in victims) < claim.blocks:
            break
        free += sum(victim.blocks for victim in victims) - claim.blocks
        left = [other for other in left if other not in victims]
        preempted += [victim.name for victim in victims]
        admitted.append(claim.name)
    assert (grants.preempt, grants.admit) == (preempted, admitted)


# Above 60 ms no prompt is admitted, above 37.8 ms none that is late.
LIMITED = EarliestDue(ttft_slo_s=TTFT_S, tpot_slo_s=0.08, tpot_limit=0.75, watermark=0.0)


def admitted(
    mean_s: float, *waiting: JobView, policy: EarliestDue = LIMITED, least_s: float = 0.01
) -> list[int]:
    """Return the arrivals that are admitted at 100 s beside requests with that mean time between tokens."""
    claims = [
        Claim(policy.rank(job), job.arrival, 1, 0 if job.output_tokens else job.prompt_tokens)
        for job in sorted(waiting, key=policy.rank)
    ]
    intervals = TokenIntervals(100.0, mean_s, least_s)
    grants: Grants[int] = allocate(policy, list, claims, Room(1_000, 1_000, 64, 1 << 20, intervals))
    assert grants.kept_back == len(claims) - len(grants.admit)
    return grants.admit


def test_prompts_wait_while_tokens_come_too_far_apart() -> None:
    timely, late = prompt(0, 99.0), prompt(1, 90.0, lapsed=True)
    assert LIMITED.may_keep_back
    assert admitted(0.037, timely, late) == [0, 1]
    assert admitted(0.039, timely, late) == [0]
    assert admitted(0.061, timely, late) == []


@pytest.mark.parametrize(("limit", "tpot_slo_s"), [(0.0, 0.08), (0.95, DEFAULT_TPOT_S), (0.95, 1.0)])
def test_no_prompt_waits_for_a_tpot_slo_that_nobody_asked_for(limit: float, tpot_slo_s: float) -> None:
    policy = EarliestDue(tpot_slo_s=tpot_slo_s, tpot_limit=limit)
    assert not policy.may_keep_back


def test_no_prompt_waits_where_late_ones_start_at_once() -> None:
    assert EarliestDue(ttft_slo_s=5.0, tpot_slo_s=0.08, late_s=5.1).may_keep_back
    assert not EarliestDue(ttft_slo_s=5.0, tpot_slo_s=0.08, late_s=5.0).may_keep_back


def test_a_prompt_is_late_once_there_is_too_little_time_for_its_prefill() -> None:
    policy = EarliestDue(ttft_slo_s=0.5)
    short, long, longest = (policy.lapses_s(prompt(0, 100.0, tokens)) for tokens in (10, 5_000, 50_000))
    own_s = nominal_s(5_000, 5_000**2)
    assert short == pytest.approx(100.5, abs=0.001)
    assert long == pytest.approx(100.5 - 1.5 * own_s)
    # Most of it may be cached.
    assert longest == 100.25


def test_late_prompts_wait_no_longer_than_until_their_turn() -> None:
    turn_has_come = prompt(1, 100.0 - LATE_S - 0.01, lapsed=True)
    assert admitted(1.0, turn_has_come) == [1]
    assert admitted(1.0, replace(turn_has_come, arrived_s=100.0 - LATE_S + 0.01)) == []


def test_what_has_tokens_does_not_wait_for_others_to_be_faster() -> None:
    assert admitted(1.0, prompt(2, 80.0), answer(0, 99.0, 10), reasoning(1, 99.0, 10)) == [0, 1]
    many = [prompt(n, 41.0 + n / 100, lapsed=True) for n in range(100)]
    assert LIMITED.rank(many[-1]) < LIMITED.rank(answer(100, 104.0, 10))
    assert admitted(1.0, *many, answer(100, 104.0, 10)) == [100]


def test_a_late_prompt_that_waits_lets_others_of_the_queue_pass() -> None:
    late = prompt(0, 100.0 - LATE_S + 1.0, lapsed=True)
    long = replace(prompt(1, 99.0, 50_000), queue_s=60.0)
    assert LIMITED.rank(late) < LIMITED.rank(long)
    assert admitted(0.039, late, long) == [1]


def test_prompts_do_not_wait_where_no_batch_keeps_the_slo() -> None:
    assert admitted(1.0, prompt(0, 99.0), least_s=0.041) == [0]
    assert admitted(1.0, prompt(0, 99.0), least_s=0.04) == []


@given(st.integers(1, 900), st.integers(1, 900), st.floats(0.0, 60.0), st.floats(0.0, 60.0), st.booleans())
def test_two_jobs_do_not_preempt_each_other(
    generated: int, other_generated: int, at_s: float, other_s: float, reasons: bool
) -> None:
    kind = reasoning if reasons else answer
    one, other = POLICY.rank(kind(0, at_s, generated)), POLICY.rank(answer(1, other_s, other_generated))
    assert not (POLICY.takes_from(one, other) and POLICY.takes_from(other, one))
    # A job that preempted another yields only after making up the lead.
    if POLICY.takes_from(one, other):
        grown = POLICY.rank(kind(0, at_s, generated + int(LEAD_S / PACE_S) - RANK_TOKENS))
        assert not POLICY.takes_from(other, grown)


@given(st.integers(1, 100_000), st.floats(0.0, 1e6), st.floats(0.0, 600.0), st.booleans())
def test_a_waiting_job_eventually_ranks_first(
    tokens: int, arrived_s: float, queue_s: float, lapsed: bool
) -> None:
    """The due time of a waiting job is fixed, and jobs that arrive a bounded time later are due later."""
    waiting_job = replace(prompt(0, arrived_s, tokens, lapsed=lapsed), queue_s=queue_s)
    yields_s = max(LATE_S, due_s(0.0, tokens, queue_s))
    later = prompt(1, arrived_s + yields_s + 0.001, 1)
    assert POLICY.rank(waiting_job) < POLICY.rank(later) < POLICY.rank(replace(later, lapsed=True))
    assert POLICY.rank(waiting_job) < POLICY.rank(answer(2, arrived_s + TTFT_S + yields_s + 0.001, 1))


def test_only_prompts_lapse() -> None:
    assert POLICY.lapses_s(prompt(0, 100.0)) is not None
    assert POLICY.lapses_s(answer(0, 100.0, 1)) is None
    assert POLICY.lapses_s(reasoning(0, 100.0, 1)) is None


def test_a_short_prompt_overtakes_a_long_one_for_a_bounded_time() -> None:
    queue_s = 60.0
    long, short = due_s(0.0, 20_000, queue_s), due_s(0.0, 200, queue_s)
    first, soon, late = (
        POLICY.rank(replace(prompt(number, at_s, tokens), queue_s=queue_s))
        for number, at_s, tokens in (
            (0, 100.0, 20_000),
            (1, 101.0, 200),
            (2, 100.0 + long - short + 0.001, 200),
        )
    )
    assert soon < first < late
    # A long prompt that found a short queue yields little.
    early = POLICY.rank(prompt(4, 100.0, 20_000))
    assert early < POLICY.rank(replace(prompt(5, 103.0), queue_s=0.5)) and early < first
    # A prompt in prefill is not preempted.
    assert not POLICY.takes_from(soon, first)
