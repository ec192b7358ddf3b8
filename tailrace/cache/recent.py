"""Find prefixes that recent arrivals share. Pure: the caller passes the time, in seconds.

Arrivals are grouped by their names at depths of 1, 2, 4, ... blocks; the shared prefix of a group is the
longest one that all its members have in common. Since a name identifies a block and all blocks before it, two
prompts agree up to some block and nowhere after.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

# Bound on remembered arrivals; beyond it, the oldest are dropped.
ARRIVALS_MAX: Final = 256


@dataclass(frozen=True, slots=True)
class PrefixArrival:
    """A request that arrived, with the names of its leading blocks of `block_tokens` tokens each."""

    at_s: float
    request_id: str
    names: Sequence[int]
    block_tokens: int


@dataclass(slots=True)
class SharedPrefix:
    """Leading blocks shared by several arrivals; the latest arrival is first."""

    names: Sequence[int]
    block_tokens: int
    arrivals: list[PrefixArrival]

    @property
    def tokens(self) -> int:
        """Return the length of the prefix in tokens."""
        return len(self.names) * self.block_tokens

    @property
    def weight(self) -> int:
        """Return the requested tokens: length times arrivals."""
        return self.tokens * len(self.arrivals)


class RecentPrefixes:
    """The arrivals of the last `period_s` seconds, at most `ARRIVALS_MAX`."""

    def __init__(self, period_s: float, arrivals: Iterable[PrefixArrival] = ()) -> None:
        """`arrivals`: recorded arrivals to start with, oldest first."""
        self.period_s = period_s
        self._arrivals: deque[PrefixArrival] = deque(arrivals, ARRIVALS_MAX)

    @property
    def arrivals(self) -> list[PrefixArrival]:
        """Return the remembered arrivals, oldest first."""
        return list(self._arrivals)

    def arrived(self, arrival: PrefixArrival) -> None:
        """Add an arrival; one without block names is ignored."""
        self._forget(arrival.at_s)
        if arrival.names and arrival.block_tokens > 0:
            self._arrivals.append(arrival)

    def find(self, request_id: str) -> PrefixArrival | None:
        """Return the arrival of this request if it is remembered, else None."""
        return next((a for a in self._arrivals if a.request_id == request_id), None)

    def shared(self, now_s: float, limit: int) -> list[SharedPrefix]:
        """Return at most `limit` prefixes of at least two arrivals each, in descending order of weight."""
        self._forget(now_s)
        at_depth: dict[int, SharedPrefix] = {}
        for arrival in reversed(self._arrivals):
            names, depth = arrival.names, 1
            while depth <= len(names):
                shared = at_depth.get(names[depth - 1])
                if shared is None:
                    at_depth[names[depth - 1]] = SharedPrefix(names, arrival.block_tokens, [arrival])
                else:
                    shared.names = shared.names[: common_blocks(shared.names, names, depth)]
                    shared.arrivals.append(arrival)
                depth *= 2
        # A prefix found at several depths counts once.
        by_end: dict[int, SharedPrefix] = {}
        for prefix in at_depth.values():
            known = by_end.get(prefix.names[-1])
            if len(prefix.arrivals) > 1 and (known is None or len(known.arrivals) < len(prefix.arrivals)):
                by_end[prefix.names[-1]] = prefix
        return sorted(by_end.values(), key=lambda p: (-p.weight, p.names[-1]))[:limit]

    def _forget(self, now_s: float) -> None:
        while self._arrivals and now_s - self._arrivals[0].at_s > self.period_s:
            self._arrivals.popleft()


def common_blocks(first: Sequence[int], second: Sequence[int], at_least: int = 0) -> int:
    """Return the number of leading blocks that two prompts have in common, by bisection.

    `at_least`: number of blocks that are known to be equal.
    """
    low, high = at_least, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[middle - 1] == second[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
