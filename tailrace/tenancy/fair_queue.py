"""Start-time fair queueing between tenants. Pure: no clock, no I/O.

Goyal, Vin and Cheng, "Start-Time Fair Queuing" (SIGCOMM 1996). A tenant's next request has a start tag:
the later of the virtual time and of the finish tag of the tenant's request before. The smallest start tag
goes first; the virtual time is the start tag of the last one that went; a request's finish tag is its start
tag plus its cost over the tenant's weight.

Two things follow, whatever comes in between. While two tenants wait, what they get, divided by their
weights, differs by at most one largest request of each, divided by its weight. And whoever waits for its next
turn sees at most so much of any other tenant go first.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

T = TypeVar("T")

# Tenants that are remembered before it is looked for the first time which of them need not be.
_LOOK_AT: Final = 2


class TenantQueueFull(Exception):
    """As many requests of the tenant wait as may."""


@dataclass(frozen=True, slots=True, eq=False)
class Entry(Generic[T]):
    """A request that waits. `cost`: in any unit, positive; of one tenant the smaller `priority` goes first,
    then who came first."""

    item: T
    tenant: str
    cost: float
    priority: int
    number: int


@dataclass(slots=True)
class _Line(Generic[T]):
    """Of one tenant, while it has any."""

    start: float
    weight: float
    entries: list[Entry[T]] = field(default_factory=list)


class FairQueue(Generic[T]):
    """Requests that wait, a bounded line for each tenant."""

    def __init__(self, most_per_tenant: int) -> None:
        self._most = most_per_tenant
        # In the order in which they began to wait: the first goes first where start tags are equal.
        self._lines: dict[str, _Line[T]] = {}
        # Finish tags of who had something; one that is not beyond the virtual time says nothing.
        self._finish: dict[str, float] = {}
        self._virtual = 0.0
        self._length = 0
        self._look_at = _LOOK_AT
        self._numbers = itertools.count()

    def __len__(self) -> int:
        """Requests of all tenants."""
        return self._length

    def __iter__(self) -> Iterator[Entry[T]]:
        return (entry for line in self._lines.values() for entry in line.entries)

    def waiting(self) -> dict[str, int]:
        """Requests by tenant, of those who have any."""
        return {tenant: len(line.entries) for tenant, line in self._lines.items()}

    def push(self, item: T, tenant: str, weight: float, cost: float, priority: int = 0) -> Entry[T]:
        """Let a request wait. `weight`: positive, the tenant's from now on. Raises TenantQueueFull."""
        line = self._lines.get(tenant)
        if line is None:
            if self._most < 1:
                raise TenantQueueFull(tenant)
            start = max(self._virtual, self._finish.get(tenant, 0.0))
            line = self._lines[tenant] = _Line(start, weight)
        elif len(line.entries) >= self._most:
            raise TenantQueueFull(tenant)
        line.weight = weight
        entry = Entry(item, tenant, cost, priority, next(self._numbers))
        insort(line.entries, entry, key=_order)
        self._length += 1
        return entry

    def pop(self) -> Entry[T]:
        """Take the one whose turn it is; costs a look at each tenant that waits. Raises IndexError."""
        if not self._lines:
            raise IndexError("nobody waits")
        tenant = min(self._lines, key=lambda name: self._lines[name].start)
        line = self._lines[tenant]
        entry = line.entries.pop(0)
        self._length -= 1
        self._virtual = line.start
        line.start = self._finish[tenant] = line.start + entry.cost / line.weight
        if not line.entries:
            del self._lines[tenant]
        if len(self._finish) >= self._look_at:
            self._forget()
        return entry

    def remove(self, entry: Entry[T]) -> None:
        """It waits no more; its tenant has had nothing for it. Raises KeyError: it does not wait."""
        line = self._lines.get(entry.tenant)
        entries = [] if line is None else line.entries
        at = bisect_left(entries, _order(entry), key=_order)
        if at == len(entries) or entries[at] is not entry:
            raise KeyError(entry.number)
        del entries[at]
        self._length -= 1
        if not entries:
            del self._lines[entry.tenant]

    def reset(self) -> None:
        """All that went is done, so that nobody is owed anything: what each had counts no more.

        Raises ValueError: somebody waits.
        """
        if self._lines:
            raise ValueError(f"{self._length} requests wait")
        self._finish.clear()
        self._virtual = 0.0

    def _forget(self) -> None:
        self._finish = {
            tenant: finish
            for tenant, finish in self._finish.items()
            if finish > self._virtual or tenant in self._lines
        }
        self._look_at = max(_LOOK_AT, 2 * len(self._finish))


def _order(entry: Entry[T]) -> tuple[int, int]:
    return entry.priority, entry.number
