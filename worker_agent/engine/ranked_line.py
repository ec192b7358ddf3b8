"""Requests that wait, in order of rank."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Generic, TypeVar

from tailrace.intra.base import Rank

M = TypeVar("M", bound=Hashable)


class RankedLine(Generic[M]):
    """The rank of a request that waits does not change, so each is asked once, when its request comes in."""

    def __init__(self, rank: Callable[[M], Rank], members: Iterable[M] = ()) -> None:
        self._rank = rank
        self._ranks: dict[M, Rank] = {member: rank(member) for member in members}
        self._entries = sorted(((rank, member) for member, rank in self._ranks.items()), key=_rank_of)

    def add(self, member: M) -> None:
        """One more, not here yet."""
        rank = self._ranks[member] = self._rank(member)
        insort(self._entries, (rank, member), key=_rank_of)

    def remove(self, member: M) -> None:
        """It must be here."""
        # A shorter tuple comes before a longer one that begins with it, so members are not compared.
        del self._entries[bisect_left(self._entries, (self._ranks.pop(member),))]

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
