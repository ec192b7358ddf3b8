"""Requests that wait, in order of rank."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterable, Iterator
from heapq import heappop, heappush
from itertools import count
from typing import Generic, TypeVar

from tailrace.intra.base import Rank

M = TypeVar("M", bound=Hashable)


class RankedLine(Generic[M]):
    """The rank of a request that waits does not change but when it lapses, so each is asked when its request
    comes in, and once more."""

    def __init__(
        self,
        rank: Callable[[M], Rank],
        lapses_s: Callable[[M], float | None],
        lapse: Callable[[M], None],
        members: Iterable[M] = (),
    ) -> None:
        """`lapses_s`: when the rank changes though nothing happens, in seconds since the epoch; None: it does
        not. `lapse`: that time has come."""
        self._rank = rank
        self._lapses_s = lapses_s
        self._lapse = lapse
        self._ranks: dict[M, Rank] = {}
        self._entries: list[tuple[Rank, M]] = []
        # (when, number, member): also of those that have left.
        self._lapses: list[tuple[float, int, M]] = []
        self._numbers = count()
        for member in members:
            self.add(member)

    def add(self, member: M) -> None:
        """One more, not here yet."""
        lapses_s = self._lapses_s(member)
        if lapses_s is not None:
            heappush(self._lapses, (lapses_s, next(self._numbers), member))
        self._insert(member)

    def advance(self, now_s: float) -> None:
        """It is so late now: rank anew whose time has come."""
        while self._lapses and self._lapses[0][0] <= now_s:
            member = heappop(self._lapses)[2]
            if member in self._ranks:
                self._lapse(member)
                self.remove(member)
                self._insert(member)

    def remove(self, member: M) -> None:
        """It must be here."""
        # A shorter tuple comes before a longer one that begins with it, so members are not compared.
        del self._entries[bisect_left(self._entries, (self._ranks.pop(member),))]

    def _insert(self, member: M) -> None:
        rank = self._ranks[member] = self._rank(member)
        insort(self._entries, (rank, member), key=_rank_of)

    def ranked(self) -> Iterator[tuple[Rank, M]]:
        """All, in order; the line must not be changed meanwhile."""
        return iter(self._entries)

    def __contains__(self, member: object) -> bool:
        return member in self._ranks

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[M]:
        return (member for _, member in self._entries)


def _rank_of(entry: tuple[Rank, object]) -> Rank:
    return entry[0]
