"""The ledger of requests' bodies: how many bytes of them are held, and how many are still arriving. Pure.

A body's announced size counts from the start, and what a request holds counts until it ends. With tenants,
one of them may hold half of everything, so that there is room for the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tailrace.tenancy.meter import BUSY_S, LimitExceeded


@dataclass(slots=True)
class _Held:
    bytes: int = 0
    arriving: int = 0


@dataclass(slots=True, eq=False)
class Body:
    """What one request's body holds. Closing it gives all of it back; what is done twice counts once."""

    _ledger: Bodies
    _tenant: str
    bytes: int = 0
    _arriving: bool = False
    _closed: bool = False

    def grow(self, to_bytes: int) -> LimitExceeded | None:
        """Hold `to_bytes` in all; return why that is not possible, in which case nothing changes."""
        more = to_bytes - self.bytes
        if self._closed or more <= 0:
            return None
        exceeded = self._ledger.bytes_refusal(self._tenant, more)
        if exceeded is None:
            self.bytes += more
            self._ledger.add(self._tenant, more, 0)
        return exceeded

    def begin_arriving(self) -> LimitExceeded | None:
        """Count it among the bodies that are still arriving; return why that is not possible."""
        if self._closed or self._arriving:
            return None
        exceeded = self._ledger.arriving_refusal(self._tenant)
        if exceeded is None:
            self._arriving = True
            self._ledger.add(self._tenant, 0, 1)
        return exceeded

    def end_arriving(self) -> None:
        """Count it as arrived."""
        if self._arriving:
            self._arriving = False
            self._ledger.add(self._tenant, 0, -1)

    def close(self) -> None:
        """Give back what it holds."""
        self.end_arriving()
        held, self.bytes = self.bytes, 0
        self._closed = True
        self._ledger.add(self._tenant, -held, 0)


@dataclass(slots=True)
class Bodies:
    """All bodies of one API server. `has_tenants`: whether one tenant may hold only half."""

    max_bytes: int
    max_arriving: int
    has_tenants: bool
    _by_tenant: dict[str, _Held] = field(default_factory=dict)
    _all: _Held = field(default_factory=_Held)

    @property
    def bytes(self) -> int:
        """Return the bytes of all bodies."""
        return self._all.bytes

    @property
    def arriving(self) -> int:
        """Return the number of bodies that are still arriving."""
        return self._all.arriving

    def open(self, tenant: str) -> Body:
        """Return the body of a request, which holds nothing yet."""
        return Body(self, tenant)

    def bytes_refusal(self, tenant: str, more: int) -> LimitExceeded | None:
        """Return why the tenant cannot hold this many bytes more, or None."""
        return self._refusal(tenant, "bytes of request bodies", self.max_bytes, more, lambda held: held.bytes)

    def arriving_refusal(self, tenant: str) -> LimitExceeded | None:
        """Return why no further body of the tenant may be arriving, or None."""
        return self._refusal(
            tenant, "request bodies that are still arriving", self.max_arriving, 1, lambda held: held.arriving
        )

    def _refusal(
        self, tenant: str, what: str, most: int, more: int, of: Callable[[_Held], int]
    ) -> LimitExceeded | None:
        if self.has_tenants and of(self._by_tenant.get(tenant, _Held())) + more > most // 2:
            return LimitExceeded(f"more than {most // 2} {what} of one key's tenant", BUSY_S)
        if of(self._all) + more > most:
            return LimitExceeded(f"more than {most} {what} of all clients", BUSY_S)
        return None

    def add(self, tenant: str, more_bytes: int, more_arriving: int) -> None:
        """Count what a body has taken, or given back; for Body alone."""
        held = self._by_tenant.setdefault(tenant, _Held())
        for one in (held, self._all):
            one.bytes += more_bytes
            one.arriving += more_arriving
        if not held.bytes and not held.arriving:
            del self._by_tenant[tenant]
