"""Our order: who is due first, who yields, and that nobody starves."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tailrace.cluster import Phase
from tailrace.intra.allocate import Claim, Grants, Room, allocate
from tailrace.intra.base import JobView
from tailrace.intra.due import due_s
from tailrace.intra.earliest_due import LATE_S, LEAD_S, RANK_TOKENS, EarliestDue

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
    made: list[Claim[int]] = []
    for number in range(draw(st.integers(0, 8))):
        at_s, output = draw(st.integers(0, 60)), draw(st.integers(1, 900))
        makes = [prompt(number, at_s), answer(number, at_s, output), reasoning(number, at_s, output)]
        job = replace(draw(st.sampled_from(makes)), arrival=first + number)
        computes = job.prompt_tokens if waiting and job.phase is Phase.PREFILL else 0
        made.append(Claim(POLICY.rank(job), first + number, draw(st.integers(1, 6)), computes))
    return made


def who_is_due_first() -> list[JobView]:
    return [
        answer(3, 100.0, 100),  # the reader comes to its next token at 110 s
        prompt(1, 111.0),
        reasoning(2, 100.0, 150),  # in time at 117 s
        answer(0, 100.0, 400),
        prompt(4, 100.0, lapsed=True),  # late: a minute later
    ]


def test_who_is_behind_goes_before_who_is_ahead() -> None:
    jobs = who_is_due_first()
    assert sorted(jobs, key=POLICY.rank) == jobs


@given(running=claims(0, waiting=False), waiting=claims(100, waiting=True), spare=st.integers(0, 6))
def test_as_a_plain_reading_of_the_rules(
    running: list[Claim[int]], waiting: list[Claim[int]], spare: int
) -> None:
    waiting = sorted(waiting)
    total = max(spare + sum(claim.blocks for claim in running), 6)
    free = total - sum(claim.blocks for claim in running)
    grants: Grants[int] = allocate(POLICY, lambda: running, waiting, Room(total, free, 64, 1 << 20))
    # From the first to the last that waits; for each the latest of those that are far enough ahead.
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


@given(st.integers(1, 900), st.integers(1, 900), st.floats(0.0, 60.0), st.floats(0.0, 60.0), st.booleans())
def test_no_two_take_from_each_other(
    made: int, other_made: int, at_s: float, other_s: float, reasons: bool
) -> None:
    kind = reasoning if reasons else answer
    one, other = POLICY.rank(kind(0, at_s, made)), POLICY.rank(answer(1, other_s, other_made))
    assert not (POLICY.takes_from(one, other) and POLICY.takes_from(other, one))
    # One that took its place gives it back only once it has made the lead good.
    if POLICY.takes_from(one, other):
        grown = POLICY.rank(kind(0, at_s, made + int(LEAD_S / PACE_S) - RANK_TOKENS))
        assert not POLICY.takes_from(other, grown)


@given(st.integers(1, 100_000), st.floats(0.0, 1e6), st.floats(0.0, 600.0), st.booleans())
def test_whoever_waits_is_first_in_the_end(
    tokens: int, arrived_s: float, queue_s: float, lapsed: bool
) -> None:
    """All that arrive a bounded time after it are due later, and one that waits is due when it was."""
    waits = replace(prompt(0, arrived_s, tokens, lapsed=lapsed), queue_s=queue_s)
    yields_s = max(LATE_S, due_s(0.0, tokens, queue_s))
    later = prompt(1, arrived_s + yields_s + 0.001, 1)
    assert POLICY.rank(waits) < POLICY.rank(later) < POLICY.rank(replace(later, lapsed=True))
    assert POLICY.rank(waits) < POLICY.rank(answer(2, arrived_s + TTFT_S + yields_s + 0.001, 1))


def test_a_prompt_lapses_when_it_has_missed_its_slo() -> None:
    assert POLICY.lapses_s(prompt(0, 100.0)) == 100.0 + TTFT_S
    assert POLICY.lapses_s(answer(0, 100.0, 1)) is None
    assert POLICY.lapses_s(reasoning(0, 100.0, 1)) is None


def test_a_short_prompt_overtakes_a_long_one_until_that_has_waited_its_time() -> None:
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
    # A long one that found next to nothing yields as little.
    early = POLICY.rank(prompt(4, 100.0, 20_000))
    assert early < POLICY.rank(replace(prompt(5, 103.0), queue_s=0.5)) and early < first
    # What is computed of it stays.
    assert not POLICY.takes_from(soon, first)
