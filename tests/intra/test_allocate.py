"""Ranks become admissions and preemptions by rules that hold for every policy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.intra.allocate import Claim, Grants, Room, allocate
from tailrace.intra.base import IntraPolicy
from tailrace.intra.fcfs import Fcfs
from tailrace.intra.round_robin import QuantumRoundRobin

POLICIES: list[IntraPolicy] = [
    Fcfs(),
    Fcfs(watermark=0.0),
    QuantumRoundRobin(),
    QuantumRoundRobin(watermark=0.0),
]


@st.composite
def claims(draw: st.DrawFn, prefix: str) -> list[Claim[str]]:
    levels = draw(st.lists(st.integers(0, 3), max_size=8))
    offset = 0 if prefix == "r" else 100
    return [
        Claim((level, n + offset), f"{prefix}{n}", draw(st.integers(1, 12))) for n, level in enumerate(levels)
    ]


@given(
    policy=st.sampled_from(POLICIES),
    running=claims("r"),
    waiting=claims("w"),
    spare=st.integers(-8, 30),
    seats=st.integers(0, 4),
)
def test_rules(
    policy: IntraPolicy, running: list[Claim[str]], waiting: list[Claim[str]], spare: int, seats: int
) -> None:
    waiting = sorted(waiting, key=lambda claim: claim.rank)
    held = sum(claim.blocks for claim in running)
    total = max(held + spare, 12)
    room = Room(total, total - held if spare >= 0 else spare, seats)
    grants: Grants[str] = allocate(policy, lambda: running, waiting, room)
    by_name = {claim.name: claim for claim in [*running, *waiting]}
    freed = sum(by_name[name].blocks for name in grants.preempt)
    taken = sum(by_name[name].blocks for name in grants.admit)
    # In order of rank, from the front, each at most once.
    assert grants.admit == [claim.name for claim in waiting[: len(grants.admit)]]
    # From the back of the running ones.
    last_first = sorted(running, key=lambda claim: claim.rank, reverse=True)
    assert grants.preempt == [claim.name for claim in last_first[: len(grants.preempt)]]
    assert len(grants.admit) <= seats + len(grants.preempt)
    if room.free_blocks < 0:
        assert not grants.admit
        assert room.free_blocks + freed >= 0 or len(grants.preempt) == len(running)
        if grants.preempt:
            # No more than needed.
            assert room.free_blocks + freed - by_name[grants.preempt[-1]].blocks < 0
        return
    assert taken <= room.free_blocks + freed
    if not policy.preemptive:
        assert not grants.preempt
    if grants.preempt:
        assert grants.admit
        # Not above the worst admitted: what a victim leaves over may do for one more of its own level.
        best_admitted = min(by_name[name].rank[:-1] for name in grants.admit)
        assert all(by_name[name].rank[:-1] > best_admitted for name in grants.preempt)


def test_the_running_are_not_listed_for_nothing() -> None:
    def never() -> list[Claim[str]]:
        raise AssertionError("not needed")

    claim = Claim((0,), "w", 5)
    assert allocate(Fcfs(), never, [claim], Room(100, 50, 4)).admit == ["w"]
    assert allocate(Fcfs(), never, [claim], Room(100, 3, 4)).admit == []


def test_the_waiting_are_read_only_as_far_as_there_is_hope() -> None:
    def waiting() -> Iterator[Claim[str]]:
        yield Claim((0,), "a", 50)
        yield Claim((1,), "b", 70)
        raise AssertionError("read too far")

    assert allocate(Fcfs(), list, waiting(), Room(100, 100, 4)).admit == ["a"]


def test_an_empty_device_takes_any_request_that_fits() -> None:
    assert allocate(Fcfs(watermark=0.1), list, [Claim((0,), "w", 100)], Room(100, 100, 4)).admit == ["w"]
    assert allocate(Fcfs(watermark=0.1), list, [Claim((0,), "w", 90)], Room(100, 99, 4)).admit == []


@pytest.mark.parametrize("seats", [0, 1])
def test_a_seat_is_taken_like_memory(seats: int) -> None:
    running = [Claim((1, 0), "r", 1)]
    grants = allocate(QuantumRoundRobin(), lambda: running, [Claim((0, 1), "w", 1)], Room(100, 90, seats))
    assert grants.admit == ["w"]
    assert grants.preempt == ([] if seats else ["r"])
