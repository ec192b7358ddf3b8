"""Allocate device memory for the next step: turn the ranks of requests into admissions and preemptions."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, NamedTuple, TypeVar

from tailrace.intra.base import IntraPolicy, Rank, TokenIntervals

Name = TypeVar("Name", bound=Hashable)

# Maximum number of requests that a step passes over, to bound the time of a decision. At about a microsecond
# each, that is a hundredth of a decode step of 6 ms, the shortest of the built-in profiles of an 8B model.
LOOKAHEAD: Final = 64
# The same for prompts that are kept back. Steps are longer then, and a request that only has to be copied
# from host memory may wait behind them.
_KEPT_BACK_MAX: Final = 256


@dataclass(frozen=True, slots=True)
class Room:
    """Free resources of the device at a step boundary."""

    total_blocks: int
    # Negative: the running requests' next tokens need that many more blocks than there are.
    free_blocks: int
    free_slots: int
    # Prompt tokens that the step may compute.
    prompt_tokens: int
    # Of the requests that decode; None: too few do, they are unknown, or the policy does not ask.
    intervals: TokenIntervals | None = None


class Claim(NamedTuple, Generic[Name]):
    """One request's demand: blocks held (running), or needed to start (waiting)."""

    rank: Rank
    name: Name
    blocks: int
    # Waiting requests: tokens to compute before decoding; 0: none, the KV is swapped out.
    prompt_tokens: int = 0
    # Waiting requests: blocks given to others that passed this one since it began to wait.
    passed_blocks: int = 0


@dataclass(slots=True)
class Grants(Generic[Name]):
    """Decisions, in order of execution: first all preemptions."""

    preempt: list[Name] = field(default_factory=list)
    admit: list[Name] = field(default_factory=list)
    # Requests that did not fit, and the blocks given to others that passed them (above 0). The caller adds
    # these to the request's `passed_blocks`, and resets that to 0 on admission.
    passed: list[tuple[Name, int]] = field(default_factory=list)
    # Prompts that wait for the running requests to get faster, and not for memory or prompt tokens.
    kept_back: int = 0


def allocate(
    policy: IntraPolicy,
    running: Callable[[], Sequence[Claim[Name]]],
    waiting: Iterable[Claim[Name]],
    room: Room,
    prefilling: Iterable[tuple[Rank, int]] = (),
) -> Grants[Name]:
    """Decide on admissions and preemptions at a step boundary.

    `running`: requests that may be preempted, in any order; called only if the list is needed. `waiting`: in
    order of rank; read only while admission may continue. `prefilling`: (rank, tokens left) of the prompts on
    the device, in order of rank. They get the step's prompt tokens before waiting prompts of lower priority,
    and a prompt is admitted only if some tokens are left for it. A request that is preempted here cannot be
    admitted at the same boundary, so the caller must call again at the next one.

    A request that does not fit is passed over by later ones of its level until these were given
    `policy.pass_over` times the device's blocks. From then on no request behind it is admitted before it, so
    that it cannot starve. With `pass_over` 0, admission stops at the first request that does not fit.
    """
    grants: Grants[Name] = Grants()
    if room.free_blocks < 0:
        # In a shortage nothing is admitted: the victims' blocks are for the growth of running requests.
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
        if claim.prompt_tokens and room.intervals and policy.keeps_back(claim.rank, room.intervals):
            grants.kept_back += 1
            if grants.kept_back == _KEPT_BACK_MAX:
                break
            continue
        if admission.admits(claim):
            budget -= claim.prompt_tokens
        elif not admission.continues:
            break
    grants.passed = admission.passed()
    return grants


class _Admission(Generic[Name]):
    """Admits waiting requests one by one, in order of rank."""

    def __init__(
        self,
        policy: IntraPolicy,
        running: Callable[[], Sequence[Claim[Name]]],
        room: Room,
        grants: Grants[Name],
    ) -> None:
        # After a request was not admitted: whether later ones may be.
        self.continues: bool
        self._policy = policy
        self._running = running
        self._total = room.total_blocks
        self._free = room.free_blocks
        self._slots = room.free_slots
        self._grants = grants
        self._watermark = int(policy.watermark * room.total_blocks)
        # Blocks that others may be given while passing one request.
        self._limit = int(policy.pass_over * room.total_blocks)
        # Requests that may be preempted, last in rank first; the first `_taken` are preempted.
        self._victims: list[Claim[Name]] | None = None
        self._taken = 0
        # Requests passed over so far: (name, blocks given at this boundary before it was passed over).
        self._passed: list[tuple[Name, int]] = []
        self._level: Rank = ()
        # The smallest claim that did not fit; no larger one fits either.
        self._too_many = room.total_blocks + 1
        # Blocks given since the first request was passed over, and how many more may be given.
        self._given = 0
        self._allowance = self._limit

    def admits(self, claim: Claim[Name]) -> bool:
        """Admit the claim if it fits; return whether it was admitted. Claims must be passed in rank order."""
        if self._passed:
            self.continues = self._allowance > 0 and self._policy.level(claim.rank) == self._level
            if not self.continues:
                return False
        # An empty device takes any request that fits at all.
        short = min(claim.blocks + self._watermark, self._total) - self._free
        if claim.blocks >= self._too_many or not self._fits(claim, short):
            self._pass_over(claim)
            return False
        self._grants.admit.append(claim.name)
        self._free -= claim.blocks
        self._slots -= 1
        if self._passed:
            self._given += claim.blocks
            self._allowance -= claim.blocks
        return True

    def passed(self) -> list[tuple[Name, int]]:
        """Return `Grants.passed`."""
        return [(name, self._given - before) for name, before in self._passed if self._given > before]

    def _fits(self, claim: Claim[Name], short: int) -> bool:
        """Return whether there is room for the claim, preempting requests of lower level if necessary."""
        if short <= 0 and self._slots > 0:
            return True
        if not self._policy.preemptive:
            return False
        takes_from, rank = self._policy.takes_from, claim.rank
        if self._victims is None:
            # Later claims rank behind this one, so they can preempt only a subset of these.
            self._victims = _last_first([other for other in self._running() if takes_from(rank, other.rank)])
        end, slots = self._taken, self._slots
        while short > 0 or slots < 1:
            if end >= len(self._victims) or not takes_from(rank, self._victims[end].rank):
                return False
            short -= self._victims[end].blocks
            slots += 1
            end += 1
        for victim in self._victims[self._taken : end]:
            self._grants.preempt.append(victim.name)
            self._free += victim.blocks
        self._taken, self._slots = end, slots
        return True

    def _pass_over(self, claim: Claim[Name]) -> None:
        """Pass over a claim that does not fit, if later ones of its level may still be admitted."""
        self.continues = (
            claim.passed_blocks < self._limit
            and len(self._passed) < LOOKAHEAD
            and (self._slots > 0 or self._policy.preemptive)
        )
        if not self.continues:
            return
        self._level = self._policy.level(claim.rank)
        self._too_many = min(self._too_many, claim.blocks)
        self._allowance = min(self._allowance, self._limit - claim.passed_blocks)
        self._passed.append((claim.name, self._given))


def _make_room(running: Sequence[Claim[Name]], blocks: int, grants: Grants[Name]) -> None:
    """Preempt requests, last in rank first, until they have freed `blocks`."""
    for victim in _last_first(running):
        if blocks <= 0:
            return
        grants.preempt.append(victim.name)
        blocks -= victim.blocks


def _last_first(claims: Sequence[Claim[Name]]) -> list[Claim[Name]]:
    return sorted(claims, key=_rank, reverse=True)


def _rank(claim: Claim[Name]) -> Rank:
    return claim.rank
