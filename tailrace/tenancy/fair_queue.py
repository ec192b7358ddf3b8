"""Start-time fair queueing between tenants. Pure: no clock, no I/O.

Goyal, Vin and Cheng, "Start-Time Fair Queuing" (SIGCOMM 1996). A tenant's next request has a start tag: the
later of the virtual time and of the finish tag of the tenant's previous request. The smallest start tag goes
first; the virtual time is the start tag of the last request that went; a request's finish tag is its start
tag plus its cost divided by the tenant's weight.

Two guarantees follow, whatever arrives in between. While two tenants wait, the service that they get, divided
by their weights, differs by at most one largest request of each, divided by its weight. And a tenant that
waits for its next turn sees at most that much of any other tenant go first.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

T = TypeVar("T")

# Number of remembered tenants at which outdated ones are first removed.
_FIRST_CLEANUP: Final = 2


class TenantQueueFull(Exception):
    """The tenant's queue is full."""


@dataclass(frozen=True, slots=True, eq=False)
class Queued(Generic[T]):
    """A waiting request. `cost`: positive, in any unit. Within a tenant the smaller `priority` goes first,
    then the older."""

    item: T
    tenant: str
    cost: float
    priority: int
    number: int


@dataclass(slots=True)
class _TenantQueue(Generic[T]):
    """The queue of one tenant, while it has any requests."""

    start: float
    weight: float
    entries: list[Queued[T]] = field(default_factory=list)


class FairQueue(Generic[T]):
    """Queue requests, with a bounded queue per tenant."""

    def __init__(self, max_per_tenant: int) -> None:
        self._max_per_tenant = max_per_tenant
        # In the order in which they began to wait, which decides between equal start tags.
        self._queues: dict[str, _TenantQueue[T]] = {}
        # Finish tags of tenants served before; one that is not beyond the virtual time is irrelevant.
        self._finish: dict[str, float] = {}
        self._virtual = 0.0
        self._length = 0
        self._cleanup_at = _FIRST_CLEANUP
        self._numbers = itertools.count()

    def __len__(self) -> int:
        """Count the requests of all tenants."""
        return self._length

    def __iter__(self) -> Iterator[Queued[T]]:
        return (entry for queue in self._queues.values() for entry in queue.entries)

    def waiting(self) -> dict[str, int]:
        """Return the number of requests of each tenant that has any."""
        return {tenant: len(queue.entries) for tenant, queue in self._queues.items()}

    def push(self, item: T, tenant: str, weight: float, cost: float, priority: int = 0) -> Queued[T]:
        """Queue a request. `weight`: positive, the tenant's from now on. Raise TenantQueueFull."""
        queue = self._queues.get(tenant)
        if queue is None:
            if self._max_per_tenant < 1:
                raise TenantQueueFull(tenant)
            start = max(self._virtual, self._finish.get(tenant, self._virtual))
            queue = self._queues[tenant] = _TenantQueue(start, weight)
        elif len(queue.entries) >= self._max_per_tenant:
            raise TenantQueueFull(tenant)
        queue.weight = weight
        entry = Queued(item, tenant, cost, priority, next(self._numbers))
        insort(queue.entries, entry, key=_order)
        self._length += 1
        return entry

    def pop(self) -> Queued[T]:
        """Remove and return the next request, in time linear in the number of waiting tenants. Raise
        IndexError if empty."""
        if not self._queues:
            raise IndexError("no request waits")
        tenant = min(self._queues, key=lambda name: self._queues[name].start)
        queue = self._queues[tenant]
        entry = queue.entries.pop(0)
        self._length -= 1
        self._virtual = queue.start
        queue.start = self._finish[tenant] = queue.start + entry.cost / queue.weight
        if not queue.entries:
            del self._queues[tenant]
        if len(self._finish) >= self._cleanup_at:
            self._clean_up()
        return entry

    def remove(self, entry: Queued[T]) -> None:
        """Remove a request without charging its tenant. Raise KeyError if it does not wait."""
        queue = self._queues.get(entry.tenant)
        entries = [] if queue is None else queue.entries
        at = bisect_left(entries, _order(entry), key=_order)
        if at == len(entries) or entries[at] is not entry:
            raise KeyError(entry.number)
        del entries[at]
        self._length -= 1
        if not entries:
            del self._queues[entry.tenant]

    def reset(self) -> None:
        """Drop what was charged, once everything admitted is done. Raise ValueError if requests wait."""
        if self._queues:
            raise ValueError(f"{self._length} requests wait")
        self._finish.clear()
        self._virtual = 0.0

    def _clean_up(self) -> None:
        self._finish = {name: finish for name, finish in self._finish.items() if finish > self._virtual}
        self._cleanup_at = max(_FIRST_CLEANUP, 2 * len(self._finish))


def _order(entry: Queued[T]) -> tuple[int, int]:
    return entry.priority, entry.number
