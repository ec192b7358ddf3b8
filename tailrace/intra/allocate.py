"""Who gets device memory for the next step: the one place where ranks become admissions and preemptions."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, NamedTuple, TypeVar

from tailrace.intra.base import IntraPolicy, Rank

Name = TypeVar("Name", bound=Hashable)

# Requests that one step passes over at most: a bound on the time of a decision. At about a microsecond each
# it is a hundredth of a decode step of 6 ms, the shortest that the built-in profiles have for an 8B model.
LOOKAHEAD: Final = 64


@dataclass(frozen=True, slots=True)
class Room:
    """What the device has left at a step boundary."""

    total_blocks: int
    # Negative: the running requests' next tokens need that many blocks more than there are.
    free_blocks: int
    free_seats: int
    # Prompt tokens that the step may compute.
    prompt_tokens: int


class Claim(NamedTuple, Generic[Name]):
    """One request's demand: blocks held (running), or needed to start (waiting)."""

    rank: Rank
    name: Name
    blocks: int
    # Of a waiting request: tokens to compute before it decodes; 0: none, its KV is swapped out.
    prompt_tokens: int = 0
    # Of a waiting request: blocks that others were given past it since it began to wait.
    passed_blocks: int = 0


@dataclass(slots=True)
class Grants(Generic[Name]):
    """Decisions, in the order in which they are to be carried out: first all preemptions."""

    preempt: list[Name] = field(default_factory=list)
    admit: list[Name] = field(default_factory=list)
    # Requests that did not fit, and the blocks that others were given past each of them (above 0): the caller
    # adds them to the request's `passed_blocks`, which go back to 0 when it is admitted.
    passed: list[tuple[Name, int]] = field(default_factory=list)


def allocate(
    policy: IntraPolicy,
    running: Callable[[], Sequence[Claim[Name]]],
    waiting: Iterable[Claim[Name]],
    room: Room,
    prefilling: Iterable[tuple[Rank, int]] = (),
) -> Grants[Name]:
    """Decide for one step boundary.

    `running`: those that may be preempted, in any order; called only if their list is needed. `waiting`: in
    order of rank; read only as far as there is hope. `prefilling`: (rank, tokens left) of the prompts on the
    device, in order of rank; they have the step's prompt tokens before the waiting prompts that rank behind
    them, and a prompt is admitted only if some are left for it. A request that is preempted here cannot come
    back at the same boundary, so the caller must ask again at the next.

    A request that does not fit is passed over by later ones of its level while `policy.pass_over` allows:
    until that many times the device's blocks were given past it. Then nobody behind it is admitted before it,
    so that it cannot starve. With `pass_over` 0 admission stops at the first that does not fit.
    """
    grants: Grants[Name] = Grants()
    if room.free_blocks < 0:
        # Whoever waits is not to profit from a shortage: the victims' room is what the rest grows into.
        _make_room(running(), -room.free_blocks, grants)
        return grants
    admission = _Admission(policy, running, room, grants)
    ahead = iter(prefilling)
    following = next(ahead, None)
    budget = room.prompt_tokens
    for claim in waiting:
        while following is not None and following[0] < claim.rank:
            budget -= following[1]
            following = next(ahead, None)
        if claim.prompt_tokens and budget <= 0:
            break
        if admission.admits(claim):
            budget -= claim.prompt_tokens
        elif not admission.goes_on:
            break
    grants.passed = admission.passed()
    return grants


class _Admission(Generic[Name]):
    """Those that wait, one after the other."""

    def __init__(
        self,
        policy: IntraPolicy,
        running: Callable[[], Sequence[Claim[Name]]],
        room: Room,
        grants: Grants[Name],
    ) -> None:
        # After one that was not admitted: whether others may be.
        self.goes_on: bool
        self._policy = policy
        self._running = running
        self._total = room.total_blocks
        self._free = room.free_blocks
        self._seats = room.free_seats
        self._grants = grants
        self._watermark = int(policy.watermark * room.total_blocks)
        # Blocks that may be given past one request.
        self._limit = int(policy.pass_over * room.total_blocks)
        # Of lower level than the first that needed one, last in rank first; the first `_taken` are preempted.
        self._victims: list[Claim[Name]] | None = None
        self._taken = 0
        # Passed over so far: (name, blocks given at this boundary before it was).
        self._passed: list[tuple[Name, int]] = []
        self._level: Rank = ()
        # No claim of so many blocks fits any more.
        self._too_many = room.total_blocks + 1
        # Blocks given since the first was passed over, and how many more may be.
        self._given = 0
        self._allowance = self._limit

    def admits(self, claim: Claim[Name]) -> bool:
        """Whether it is admitted. It ranks behind all that were asked about."""
        if self._passed:
            self.goes_on = self._allowance > 0 and self._policy.level(claim.rank) == self._level
            if not self.goes_on:
                return False
        # An empty device takes any request that fits at all.
        short = min(claim.blocks + self._watermark, self._total) - self._free
        if claim.blocks >= self._too_many or not self._fits(claim, short):
            self._pass_over(claim)
            return False
        self._grants.admit.append(claim.name)
        self._free -= claim.blocks
        self._seats -= 1
        if self._passed:
            self._given += claim.blocks
            self._allowance -= claim.blocks
        return True

    def passed(self) -> list[tuple[Name, int]]:
        """As Grants has it."""
        return [(name, self._given - before) for name, before in self._passed if self._given > before]

    def _fits(self, claim: Claim[Name], short: int) -> bool:
        """Whether there is room for it, if need be by preempting those of lower level."""
        if short <= 0 and self._seats > 0:
            return True
        if not self._policy.preemptive:
            return False
        takes_from, rank = self._policy.takes_from, claim.rank
        if self._victims is None:
            # Those that wait behind this one can take from nobody else.
            self._victims = _last_first([other for other in self._running() if takes_from(rank, other.rank)])
        end, seats = self._taken, self._seats
        while short > 0 or seats < 1:
            if end >= len(self._victims) or not takes_from(rank, self._victims[end].rank):
                return False
            short -= self._victims[end].blocks
            seats += 1
            end += 1
        for victim in self._victims[self._taken : end]:
            self._grants.preempt.append(victim.name)
            self._free += victim.blocks
        self._taken, self._seats = end, seats
        return True

    def _pass_over(self, claim: Claim[Name]) -> None:
        """It does not fit: whether others of its level may take what there is."""
        self.goes_on = (
            claim.passed_blocks < self._limit
            and len(self._passed) < LOOKAHEAD
            and (self._seats > 0 or self._policy.preemptive)
        )
        if not self.goes_on:
            return
        self._level = self._policy.level(claim.rank)
        self._too_many = min(self._too_many, claim.blocks)
        self._allowance = min(self._allowance, self._limit - claim.passed_blocks)
        self._passed.append((claim.name, self._given))


def _make_room(running: Sequence[Claim[Name]], blocks: int, grants: Grants[Name]) -> None:
    """Preempt the last in rank until they hold so many blocks."""
    for victim in _last_first(running):
        if blocks <= 0:
            return
        grants.preempt.append(victim.name)
        blocks -= victim.blocks


def _last_first(claims: Sequence[Claim[Name]]) -> list[Claim[Name]]:
    return sorted(claims, key=_rank, reverse=True)


def _rank(claim: Claim[Name]) -> Rank:
    return claim.rank
