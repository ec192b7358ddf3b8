"""Requests by rank, which the intra-instance policy computes only when it may have changed."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import Final, Generic, TypeVar

from tailrace.cluster import Phase
from tailrace.intra.base import IntraPolicy, JobView, Rank
from tailrace.intra.earliest_due import nominal_s

_NEVER: Final = 1 << 62
_NUMBERS: Final = 1 << 20


def arrival_order(arrival_s: float, number: int) -> int:
    """Return JobView.arrival: the API server's arrival time, which survives a migration, in microseconds,
    with `number` as a tie-breaker."""
    return round(arrival_s * 1e6) * _NUMBERS + number % _NUMBERS


def arrival_time_s(arrival: int) -> float:
    """Return the time that was passed to `arrival_order`, to the microsecond."""
    return arrival // _NUMBERS / 1e6


def serving_phase(output_tokens: int, reasons: bool) -> Phase:
    """Return the phase that an order uses. `reasons`: the next token belongs to the reasoning.

    A request whose KV must be recomputed keeps its phase: its prefill is served with that phase's priority.
    """
    if not output_tokens:
        return Phase.PREFILL
    return Phase.REASONING if reasons else Phase.ANSWERING


def remaining_prefill_s(total_tokens: int, computed_tokens: int) -> float:
    """Return a request's remaining prefill in seconds, as in JobView.queue_s; 0 if only one token is left."""
    if total_tokens - computed_tokens <= 1:
        return 0.0
    squares = total_tokens * total_tokens - computed_tokens * computed_tokens
    return nominal_s(total_tokens - computed_tokens, squares)


def view_of(
    turn: Turn, reasons: bool, prompt_tokens: int, output_tokens: int, reasoning_tokens: int
) -> JobView:
    """Return the request as an intra-instance policy sees it."""
    phase = serving_phase(output_tokens, reasons)
    in_phase = output_tokens - reasoning_tokens if phase is Phase.ANSWERING else output_tokens
    arrival = turn.arrival
    arrival_s = arrival_time_s(arrival)
    return JobView(
        arrival,
        phase,
        prompt_tokens,
        output_tokens,
        in_phase,
        arrival_s,
        turn.queue_s,
        turn.answering_s or arrival_s,
        turn.lapsed,
    )


@dataclass(slots=True, eq=False)
class Turn:
    """One request's place in the order: its cached `rank` and what the rank depends on.

    `arrival`, `queue_s` and `lapsed` are as in JobView, and so is `answering_s`, but 0 before the first
    answering token. `passed_blocks`: as in `tailrace.intra.allocate.Claim`.
    """

    arrival: int
    queue_s: float = 0.0
    answering_s: float = 0.0
    lapsed: bool = False
    passed_blocks: int = 0
    rank: Rank = ()
    _until: int = 0
    _phase: Phase | None = None
    _policy: IntraPolicy | None = None

    def start_answering(self, now_s: float, for_s: float = 0.0) -> None:
        """Record that the answer began `for_s` seconds before `now_s` (seconds since the epoch); later calls
        are ignored."""
        if not self.answering_s:
            self.answering_s = now_s - for_s

    def lapse(self) -> None:
        """Invalidate the rank, because the time given by `IntraPolicy.lapses_s` has come."""
        self.lapsed = True
        self._until = 0

    def is_current(self, policy: IntraPolicy, phase: Phase, output_tokens: int) -> bool:
        """Return whether `rank` is still what `policy` would compute."""
        return output_tokens < self._until and phase is self._phase and policy is self._policy

    def update(self, policy: IntraPolicy, job: JobView) -> None:
        """Compute the rank of the request as it is now."""
        self.rank = policy.rank(job)
        holds = policy.rank_holds(job)
        self._until = _NEVER if holds is None else job.output_tokens + holds
        self._phase = job.phase
        self._policy = policy


M = TypeVar("M", bound=Hashable)


class RankedRequests(Generic[M]):
    """A sorted collection of waiting requests. A rank changes only when it lapses, at most once, so each is
    computed on insertion and once more when it lapses."""

    def __init__(
        self,
        rank: Callable[[M], Rank],
        lapses_s: Callable[[M], float | None],
        lapse: Callable[[M], None],
        members: Iterable[M] = (),
    ) -> None:
        """`lapses_s` returns when the rank will change by itself, in seconds since the epoch, or None.
        `lapse` is called at that time."""
        self._rank = rank
        self._lapses_s = lapses_s
        self._lapse = lapse
        self._ranks: dict[M, Rank] = {}
        self._entries: list[tuple[Rank, M]] = []
        # (time, number, member), including members that have been removed.
        self._lapses: list[tuple[float, int, M]] = []
        self._numbers = count()
        for member in members:
            self.add(member)

    def add(self, member: M) -> None:
        """Add a member that is not in the collection."""
        lapses_s = self._lapses_s(member)
        if lapses_s is not None:
            heappush(self._lapses, (lapses_s, next(self._numbers), member))
        self._insert(member)

    def advance(self, now_s: float) -> None:
        """Recompute the ranks that have lapsed by `now_s`, in seconds since the epoch."""
        while self._lapses and self._lapses[0][0] <= now_s:
            member = heappop(self._lapses)[2]
            if member in self._ranks:
                self._lapse(member)
                self.remove(member)
                self._insert(member)

    def remove(self, member: M) -> None:
        """Remove a member, which must be in the collection."""
        # A tuple sorts before longer ones that begin with it, so members are not compared.
        del self._entries[bisect_left(self._entries, (self._ranks.pop(member),))]

    def _insert(self, member: M) -> None:
        rank = self._ranks[member] = self._rank(member)
        insort(self._entries, (rank, member), key=_rank_of)

    def ranked(self) -> Iterator[tuple[Rank, M]]:
        """Iterate over ranks and members in order; the collection must not be changed meanwhile."""
        return iter(self._entries)

    def __contains__(self, member: object) -> bool:
        return member in self._ranks

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[M]:
        return (member for _, member in self._entries)


def _rank_of(entry: tuple[Rank, object]) -> Rank:
    return entry[0]
