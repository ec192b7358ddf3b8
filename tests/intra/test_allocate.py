"""Admissions and preemptions follow rules that hold for every policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.intra.allocate import LOOKAHEAD, Claim, Grants, Room, allocate
from tailrace.intra.base import IntraPolicy
from tailrace.intra.orders import Fcfs, QuantumRoundRobin

POLICIES: list[IntraPolicy] = [
    Fcfs(),
    Fcfs(watermark=0.0),
    QuantumRoundRobin(),
    QuantumRoundRobin(watermark=0.0),
]
PASSING: list[IntraPolicy] = [
    Fcfs(pass_over=0.5),
    Fcfs(pass_over=2.0, watermark=0.0),
    QuantumRoundRobin(pass_over=0.5),
    QuantumRoundRobin(pass_over=2.0, watermark=0.0),
]
PROMPT_TOKENS = 2_048


def room(total: int, free: int, slots: int) -> Room:
    return Room(total, free, slots, PROMPT_TOKENS)


@st.composite
def claims(draw: st.DrawFn, prefix: str) -> list[Claim[str]]:
    levels = draw(st.lists(st.integers(0, 3), max_size=8))
    offset = 0 if prefix == "r" else 100
    passed = st.integers(0, 30) if prefix == "w" else st.just(0)
    return [
        Claim((level, n + offset), f"{prefix}{n}", draw(st.integers(1, 12)), 0, draw(passed))
        for n, level in enumerate(levels)
    ]


@given(
    policy=st.sampled_from([*POLICIES, *PASSING]),
    running=claims("r"),
    waiting=claims("w"),
    spare=st.integers(-8, 30),
    slots=st.integers(0, 4),
)
def test_invariants_of_allocation(
    policy: IntraPolicy, running: list[Claim[str]], waiting: list[Claim[str]], spare: int, slots: int
) -> None:
    waiting = sorted(waiting, key=lambda claim: claim.rank)
    held = sum(claim.blocks for claim in running)
    total = max(held + spare, 12)
    free = total - held if spare >= 0 else spare
    grants: Grants[str] = allocate(policy, lambda: running, waiting, room(total, free, slots))
    by_name = {claim.name: claim for claim in [*running, *waiting]}
    freed = sum(by_name[name].blocks for name in grants.preempt)
    taken = sum(by_name[name].blocks for name in grants.admit)
    names = [claim.name for claim in waiting]
    # Admissions are in order of rank, each at most once.
    assert grants.admit == [name for name in names if name in grants.admit]
    if not policy.pass_over:
        # Admissions are a prefix of the queue.
        assert grants.admit == names[: len(grants.admit)]
        assert not grants.passed
    # Preemptions start with the last rank.
    last_first = sorted(running, key=lambda claim: claim.rank, reverse=True)
    assert grants.preempt == [claim.name for claim in last_first[: len(grants.preempt)]]
    assert len(grants.admit) <= slots + len(grants.preempt)
    if free < 0:
        assert not grants.admit
        assert not grants.passed
        assert free + freed >= 0 or len(grants.preempt) == len(running)
        if grants.preempt:
            # Not more than needed.
            assert free + freed - by_name[grants.preempt[-1]].blocks < 0
        return
    assert taken <= free + freed
    if not policy.preemptive:
        assert not grants.preempt
    if grants.preempt:
        assert grants.admit
        # Victims rank below the best admitted one; the rest of their blocks may admit one more of their own
        # level.
        best_admitted = min(by_name[name].rank[:-1] for name in grants.admit)
        assert all(by_name[name].rank[:-1] > best_admitted for name in grants.preempt)


@given(
    policy=st.sampled_from(PASSING),
    running=claims("r"),
    waiting=claims("w"),
    spare=st.integers(0, 30),
    slots=st.integers(0, 4),
)
def test_blocks_that_pass_a_request_are_counted(
    policy: IntraPolicy, running: list[Claim[str]], waiting: list[Claim[str]], spare: int, slots: int
) -> None:
    waiting = sorted(waiting, key=lambda claim: claim.rank)
    total = max(sum(claim.blocks for claim in running) + spare, 12)
    free = total - sum(claim.blocks for claim in running)
    grants: Grants[str] = allocate(policy, lambda: running, waiting, room(total, free, slots))
    limit = int(policy.pass_over * total)
    passed = dict(grants.passed)
    admitted = [claim for claim in waiting if claim.name in grants.admit]
    for claim in waiting:
        behind = [other for other in admitted if other.rank > claim.rank]
        if claim in admitted:
            assert claim.name not in passed
            continue
        assert passed.get(claim.name, 0) == sum(other.blocks for other in behind)
        if behind:
            # Only requests of its own level pass it, and only within the limit.
            assert {policy.level(other.rank) for other in behind} == {policy.level(claim.rank)}
            assert claim.passed_blocks + sum(other.blocks for other in behind[:-1]) < limit
            # Requests that pass it need fewer blocks.
            assert all(other.blocks < claim.blocks for other in behind)


@given(
    policy=st.sampled_from([*POLICIES, *PASSING]),
    running=claims("r"),
    waiting=claims("w"),
    spare=st.integers(0, 30),
    slots=st.integers(0, 4),
)
def test_a_request_that_fits_waits_only_behind_ones_it_must_not_pass(
    policy: IntraPolicy, running: list[Claim[str]], waiting: list[Claim[str]], spare: int, slots: int
) -> None:
    waiting = sorted(waiting, key=lambda claim: claim.rank)
    total = max(sum(claim.blocks for claim in running) + spare, 12)
    at_start = room(total, total - sum(claim.blocks for claim in running), slots)
    limit, watermark = int(policy.pass_over * total), int(policy.watermark * total)
    blocks = {claim.name: claim.blocks for claim in [*running, *waiting]}
    admitted = allocate(policy, lambda: running, waiting, at_start).admit
    for number, claim in enumerate(waiting):
        if claim.name in admitted:
            continue
        # The room left when its turn comes.
        before: Grants[str] = allocate(policy, lambda: running, waiting[:number], at_start)
        free = at_start.free_blocks + sum(blocks[name] for name in before.preempt)
        free -= sum(blocks[name] for name in before.admit)
        places = slots + len(before.preempt) - len(before.admit)
        short = min(claim.blocks + watermark, total) - free
        if policy.preemptive and (short > 0 or places < 1):
            victims = [other for other in running if policy.takes_from(claim.rank, other.rank)]
            victims = [other for other in victims if other.name not in before.preempt]
            short -= sum(other.blocks for other in victims)
            places += len(victims)
        if short > 0 or places < 1:
            continue
        ahead = [other for other in waiting[:number] if other.name in before.admit]
        refused = [other for other in waiting[:number] if other.name not in before.admit]
        assert any(
            policy.level(other.rank) != policy.level(claim.rank)
            or other.passed_blocks + sum(each.blocks for each in ahead if each.rank > other.rank) >= limit
            for other in refused
        )


@given(
    policy=st.sampled_from(PASSING),
    large=st.integers(2, 20),
    others=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 4)), min_size=1, max_size=30),
)
def test_no_request_starves(policy: IntraPolicy, large: int, others: Sequence[tuple[int, int]]) -> None:
    """A large request is first in the queue, and smaller ones of its level keep arriving."""
    total = 20
    limit = int(policy.pass_over * total)
    longest = max(rounds for _, rounds in others)
    # Until the device is empty, a request passes it or it is admitted.
    bound = (longest + 1) * (limit + 2)
    # Remaining rounds and blocks of running requests; the device is full when the large one arrives.
    running: dict[str, tuple[int, int]] = {"before": (longest, total - 1)}
    waiting = [Claim((0, 0), "large", large)]
    passed = 0
    for number in range(bound):
        blocks, _ = others[number % len(others)]
        waiting.append(Claim((0, number + 1), str(number), min(blocks, large - 1)))
        on_device = [
            Claim((0, 10_000 + n), name, held) for n, (name, (_, held)) in enumerate(running.items())
        ]
        free = total - sum(held for _, held in running.values())
        grants: Grants[str] = allocate(policy, on_device.copy, waiting, room(total, free, 8))
        assert not grants.preempt
        if "large" in grants.admit:
            return
        passed += dict(grants.passed).get("large", 0)
        assert passed < limit + large
        waiting[0] = waiting[0]._replace(passed_blocks=passed)
        for claim in [claim for claim in waiting if claim.name in grants.admit]:
            waiting.remove(claim)
            running[claim.name] = (others[int(claim.name) % len(others)][1], claim.blocks)
        running = {name: (left - 1, held) for name, (left, held) in running.items() if left > 1}
    raise AssertionError(f"still waiting after {bound} rounds, passed by {passed} blocks")


def test_running_requests_are_listed_only_if_needed() -> None:
    def never() -> list[Claim[str]]:
        raise AssertionError("not needed")

    claim = Claim((0,), "w", 5)
    assert allocate(Fcfs(), never, [claim], room(100, 50, 4)).admit == ["w"]
    assert allocate(Fcfs(), never, [claim], room(100, 3, 4)).admit == []


def test_the_queue_is_read_only_as_far_as_needed() -> None:
    def waiting() -> Iterator[Claim[str]]:
        yield Claim((0,), "a", 50)
        yield Claim((1,), "b", 70)
        raise AssertionError("read too far")

    assert allocate(Fcfs(), list, waiting(), room(100, 100, 4)).admit == ["a"]


def test_passing_over_continues_after_a_request_that_does_not_fit() -> None:
    waiting = [Claim((0,), "large", 60), Claim((1,), "small", 20), Claim((2,), "middling", 50)]
    half = room(100, 55, 4)
    assert allocate(Fcfs(), list, waiting, half).admit == []
    grants = allocate(Fcfs(pass_over=1.0), list, waiting, half)
    assert (grants.admit, grants.passed) == (["small"], [("large", 20)])
    waiting[0] = waiting[0]._replace(passed_blocks=100)
    assert allocate(Fcfs(pass_over=1.0), list, waiting, half).admit == []


def test_a_request_of_a_better_level_is_not_passed_over() -> None:
    """It may soon preempt to get its blocks: a request that passed it would be swapped out again."""
    waiting = [Claim((0, 0), "large", 60), Claim((1, 1), "small", 20)]
    assert allocate(QuantumRoundRobin(pass_over=1.0), list, waiting, room(100, 55, 4)).admit == []


def test_a_step_passes_over_a_limited_number() -> None:
    def waiting() -> Iterator[Claim[str]]:
        for number in range(LOOKAHEAD + 1):
            yield Claim((number,), str(number), 60)
        raise AssertionError("read too far")

    assert allocate(Fcfs(pass_over=1.0), list, waiting(), room(100, 55, 4)).admit == []


def test_a_passed_prompt_takes_no_prompt_tokens() -> None:
    waiting = [Claim((0,), "large", 60, PROMPT_TOKENS), Claim((1,), "small", 20, 320)]
    grants = allocate(Fcfs(pass_over=1.0), list, waiting, room(100, 55, 4))
    assert grants.admit == ["small"]


def test_prompts_in_prefill_take_precedence_over_later_ones() -> None:
    claim = Claim((5,), "w", 10, 160)
    ample = room(100, 100, 4)
    assert allocate(Fcfs(), list, [claim], ample, [((3,), PROMPT_TOKENS)]).admit == []
    assert allocate(Fcfs(), list, [claim], ample, [((3,), PROMPT_TOKENS - 1)]).admit == ["w"]
    assert allocate(Fcfs(), list, [claim], ample, [((7,), PROMPT_TOKENS)]).admit == ["w"]


def test_an_empty_device_takes_any_request_that_fits() -> None:
    assert allocate(Fcfs(watermark=0.1), list, [Claim((0,), "w", 100)], room(100, 100, 4)).admit == ["w"]
    assert allocate(Fcfs(watermark=0.1), list, [Claim((0,), "w", 90)], room(100, 99, 4)).admit == []


def test_requests_larger_than_the_device_are_not_admitted() -> None:
    for policy in (Fcfs(watermark=0.0), Fcfs(pass_over=1.0), QuantumRoundRobin()):
        for blocks in (101, 102, 1_000):
            large, small = Claim((0, 0), "large", blocks), Claim((0, 1), "small", 1)
            admitted = allocate(policy, list, [large, small], room(100, 100, 4)).admit
            assert admitted == (["small"] if policy.pass_over else [])


def test_a_step_without_prompt_tokens_admits_swapped_requests() -> None:
    swapped, prompt = Claim((0,), "swapped", 5), Claim((1,), "prompt", 5, 160)
    none_left = Room(100, 50, 4, prompt_tokens=0)
    assert allocate(Fcfs(), list, [swapped, prompt], none_left).admit == ["swapped"]
    # Requests do not pass a prompt whose turn it is.
    late = swapped._replace(rank=(2,))
    assert allocate(Fcfs(), list, [prompt, late], none_left).admit == []


def test_a_full_device_is_not_a_shortage() -> None:
    """A better level still preempts a lower one; during a shortage, no request is admitted."""
    running, waiting = [Claim((1, 0), "r", 5)], [Claim((0, 1), "w", 2)]
    grants = allocate(QuantumRoundRobin(watermark=0.0), lambda: running, waiting, room(5, 0, 4))
    assert (grants.preempt, grants.admit) == (["r"], ["w"])
    grants = allocate(QuantumRoundRobin(watermark=0.0), lambda: running, waiting, room(5, -1, 4))
    assert (grants.preempt, grants.admit) == (["r"], [])


@pytest.mark.parametrize("slots", [0, 1])
def test_a_slot_is_preempted_like_memory(slots: int) -> None:
    running = [Claim((1, 0), "r", 1)]
    grants = allocate(QuantumRoundRobin(), lambda: running, [Claim((0, 1), "w", 1)], room(100, 90, slots))
    assert grants.admit == ["w"]
    assert grants.preempt == ([] if slots else ["r"])


def test_only_the_shortage_is_preempted() -> None:
    running = [Claim((0, n), name, 3) for n, name in enumerate("abc")]
    grants: Grants[str] = allocate(Fcfs(), lambda: running, [], room(9, -3, 4))
    assert grants.preempt == ["c"]
    grants = allocate(Fcfs(), lambda: running, [], room(9, -4, 4))
    assert grants.preempt == ["c", "b"]


def test_without_a_slot_only_the_first_request_is_read() -> None:
    read: list[str] = []

    def waiting() -> Iterator[Claim[str]]:
        for n, name in enumerate("abc"):
            read.append(name)
            yield Claim((0, n), name, 1)

    grants: Grants[str] = allocate(Fcfs(pass_over=2.0), list, waiting(), room(100, 100, 0))
    assert (grants.admit, grants.passed, read) == ([], [], ["a"])


def test_the_blocks_that_pass_a_request_are_limited() -> None:
    """The limit is half of ten blocks: five pass the first request, then none, whatever is free."""
    policy = Fcfs(pass_over=0.5, watermark=0.0)
    waiting = [Claim((0, 0), "large", 9, 0), Claim((0, 1), "five", 5, 0), Claim((0, 2), "one", 1, 0)]
    grants: Grants[str] = allocate(policy, list, waiting, room(10, 6, 4))
    assert (grants.admit, grants.passed) == (["five"], [("large", 5)])
    # After four blocks, one more may pass.
    waiting[1] = Claim((0, 1), "four", 4, 0)
    grants = allocate(policy, list, waiting, room(10, 6, 4))
    assert (grants.admit, grants.passed) == (["four", "one"], [("large", 5)])
