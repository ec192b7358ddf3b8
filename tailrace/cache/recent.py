"""Prefixes that arrivals of the last seconds share. Pure: the caller brings the time, in seconds.

A prefix is looked for at depths of 1, 2, 4, ... blocks, and is then as long as all of those go together that
agree there: a name stands for a block and all before it, so that two prompts agree up to one place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

# Arrivals that are remembered at a time; beyond, the oldest are forgotten.
ARRIVALS_MAX: Final = 256


@dataclass(frozen=True, slots=True)
class PrefixArrival:
    """A request that came, and the names of the blocks that it begins with, of so many tokens each."""

    at_s: float
    request_id: str
    names: Sequence[int]
    block_tokens: int


@dataclass(slots=True)
class SharedPrefix:
    """Blocks that several arrivals begin with, the latest arrival first."""

    names: Sequence[int]
    block_tokens: int
    arrivals: list[PrefixArrival]

    @property
    def tokens(self) -> int:
        """Its length."""
        return len(self.names) * self.block_tokens

    @property
    def weight(self) -> int:
        """Tokens that were asked for."""
        return self.tokens * len(self.arrivals)


class RecentPrefixes:
    """Arrivals of the last `period_s`, `ARRIVALS_MAX` at most."""

    def __init__(self, period_s: float, arrivals: Iterable[PrefixArrival] = ()) -> None:
        """`arrivals`: oldest first, as `arrivals` gives them."""
        self.period_s = period_s
        self._arrivals: deque[PrefixArrival] = deque(arrivals, ARRIVALS_MAX)

    @property
    def arrivals(self) -> list[PrefixArrival]:
        """All that are remembered, oldest first."""
        return list(self._arrivals)

    def arrived(self, arrival: PrefixArrival) -> None:
        """A request came; one without names is none of interest."""
        self._forget(arrival.at_s)
        if arrival.names and arrival.block_tokens > 0:
            self._arrivals.append(arrival)

    def find(self, request_id: str) -> PrefixArrival | None:
        """The arrival, if it is remembered."""
        return next((a for a in self._arrivals if a.request_id == request_id), None)

    def shared(self, now_s: float, most: int) -> list[SharedPrefix]:
        """Prefixes of at least two arrivals, by their weight, the heaviest first; at most so many."""
        self._forget(now_s)
        at_depth: dict[int, SharedPrefix] = {}
        for arrival in reversed(self._arrivals):
            names, depth = arrival.names, 1
            while depth <= len(names):
                found = at_depth.get(names[depth - 1])
                if found is None:
                    at_depth[names[depth - 1]] = SharedPrefix(names, arrival.block_tokens, [arrival])
                else:
                    found.names = found.names[: agreeing(found.names, names, depth)]
                    found.arrivals.append(arrival)
                depth *= 2
        # What is found at several depths is one prefix.
        by_end: dict[int, SharedPrefix] = {}
        for prefix in at_depth.values():
            known = by_end.get(prefix.names[-1])
            if len(prefix.arrivals) > 1 and (known is None or len(known.arrivals) < len(prefix.arrivals)):
                by_end[prefix.names[-1]] = prefix
        return sorted(by_end.values(), key=lambda p: (-p.weight, p.names[-1]))[:most]

    def _forget(self, now_s: float) -> None:
        while self._arrivals and now_s - self._arrivals[0].at_s > self.period_s:
            self._arrivals.popleft()


def agreeing(one: Sequence[int], other: Sequence[int], at_least: int = 0) -> int:
    """How many blocks two prompts have in common, by bisection; the first `at_least` are known to be."""
    low, high = at_least, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
