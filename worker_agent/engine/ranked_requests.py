"""Waiting requests in order of rank."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterable, Iterator
from heapq import heappop, heappush
from itertools import count
from typing import Generic, TypeVar

from tailrace.intra.base import Rank

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
