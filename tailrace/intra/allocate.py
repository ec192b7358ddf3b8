"""Who gets device memory for the next step: the one place where ranks become admissions and preemptions."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from tailrace.intra.base import IntraPolicy, Rank

Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Room:
    """What the device has left at a step boundary."""

    total_blocks: int
    # Negative: the running requests' next tokens need that many blocks more than there are.
    free_blocks: int
    free_seats: int


class Claim(NamedTuple, Generic[Name]):
    """One request's demand: blocks held (running), or needed to start (waiting)."""

    rank: Rank
    name: Name
    blocks: int


@dataclass(slots=True)
class Grants(Generic[Name]):
    """Decisions, in the order in which they are to be carried out: first all preemptions."""

    preempt: list[Name] = field(default_factory=list)
    admit: list[Name] = field(default_factory=list)


def allocate(
    policy: IntraPolicy,
    running: Callable[[], Sequence[Claim[Name]]],
    waiting: Iterable[Claim[Name]],
    room: Room,
) -> Grants[Name]:
    """Decide for one step boundary.

    `running`: those that may be preempted, in any order; called only if their list is needed. `waiting`:
    in order of rank; read only as far as there is hope. A request that is preempted here cannot come back
    at the same boundary, so the caller must ask again at the next.

    Admission stops at the first that does not fit: a small request does not slip past a large one, or the
    large one would starve.
    """
    grants: Grants[Name] = Grants()
    free = room.free_blocks
    seats = room.free_seats
    last_first: list[Claim[Name]] | None = None
    taken = 0
    if free < 0:
        last_first = _last_first(running())
        while free < 0 and taken < len(last_first):
            victim = last_first[taken]
            taken += 1
            grants.preempt.append(victim.name)
            free += victim.blocks
            seats += 1
        # Whoever waits is not to profit from a shortage: the victims' room is what the rest grows into.
        return grants
    watermark = int(policy.watermark * room.total_blocks)
    for claim in waiting:
        # An empty device takes any request that fits at all.
        reserve = min(watermark, room.total_blocks - claim.blocks)
        short = claim.blocks + reserve - free
        if short > 0 or seats < 1:
            if not policy.preemptive:
                break
            if last_first is None:
                # Those that wait behind this one have no lower level: nobody else can become a victim.
                level = policy.level(claim.rank)
                last_first = _last_first([other for other in running() if policy.level(other.rank) > level])
            end = _victims(policy, claim, last_first, taken, short, seats)
            if end == taken:
                break
            for victim in last_first[taken:end]:
                grants.preempt.append(victim.name)
                free += victim.blocks
                seats += 1
            taken = end
        grants.admit.append(claim.name)
        free -= claim.blocks
        seats -= 1
    return grants


class Wanting(NamedTuple, Generic[Name]):
    """One request that waits. `prefill_tokens`: to compute first; 0: none, its KV is swapped out."""

    claim: Claim[Name]
    prefill_tokens: int


def within_budget(
    waiting: Iterable[Wanting[Name]], prefilling: Iterable[tuple[Rank, int]], budget: int
) -> Iterator[Claim[Name]]:
    """Claims of those that wait, in order, until the step has no prefill budget left for the next.

    `waiting`: in order of rank. `prefilling`: (rank, tokens left) of the prompts on the device, in order of
    rank; those before a waiting prompt have the budget first. A swapped request needs none of it.
    """
    ahead = iter(prefilling)
    following = next(ahead, None)
    for claim, prefill_tokens in waiting:
        while following is not None and following[0] < claim.rank:
            budget -= following[1]
            following = next(ahead, None)
        if prefill_tokens:
            if budget <= 0:
                return
            budget -= prefill_tokens
        yield claim


def _last_first(claims: Sequence[Claim[Name]]) -> list[Claim[Name]]:
    return sorted(claims, key=_rank, reverse=True)


def _rank(claim: Claim[Name]) -> Rank:
    return claim.rank


def _victims(
    policy: IntraPolicy,
    claim: Claim[Name],
    last_first: Sequence[Claim[Name]],
    taken: int,
    short: int,
    seats: int,
) -> int:
    """Index after the last victim that makes room for `claim`; `taken` if there are not enough of them."""
    level = policy.level(claim.rank)
    end = taken
    while short > 0 or seats < 1:
        if end >= len(last_first) or policy.level(last_first[end].rank) <= level:
            return taken
        short -= last_first[end].blocks
        seats += 1
        end += 1
    return end
