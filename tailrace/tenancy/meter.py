"""Meter what tenants use and enforce their limits. Pure: callers pass the time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from tailrace.tenancy.keys import Tenant

_MINUTE_S: Final = 60.0
BUSY_S: Final = 1
"""Retry interval when a limit on what is in progress is reached: when a request ends is unknown."""


@dataclass(frozen=True, slots=True)
class LimitExceeded:
    """Why a request is refused, and after how many seconds it is worth retrying; 0: never."""

    reason: str
    retry_after_s: int


@dataclass(slots=True)
class _Bucket:
    """A token bucket. May be overdrawn by usage that is known only afterwards."""

    level: float
    refilled_s: float

    def refill(self, per_minute: float, capacity: float, now_s: float) -> None:
        gained = (now_s - self.refilled_s) * per_minute / _MINUTE_S
        self.level = min(capacity, self.level + max(0.0, gained))
        self.refilled_s = max(self.refilled_s, now_s)

    def wait_s(self, tokens: float, per_minute: float) -> int:
        """Return the seconds until the bucket contains `tokens`."""
        return max(1, math.ceil((tokens - self.level) * _MINUTE_S / per_minute))


@dataclass(slots=True)
class _Usage:
    running: int = 0
    requests: _Bucket | None = None
    tokens: _Bucket | None = None


@dataclass(slots=True)
class Meter:
    """Meter all tenants. A tenant's limits may change from one request to the next."""

    _by_tenant: dict[str, _Usage] = field(default_factory=dict)

    def refusal(self, tenant: Tenant, now_s: float, sequences: int = 1) -> LimitExceeded | None:
        """Return why a request of so many sequences that begins now is refused, or None. Count nothing."""
        usage = self._by_tenant.setdefault(tenant.name, _Usage())
        if tenant.concurrency and usage.running + sequences > tenant.concurrency:
            if sequences > tenant.concurrency:
                return LimitExceeded(f"{sequences} sequences of {tenant.concurrency} at a time", 0)
            return LimitExceeded(
                f"{usage.running} of {tenant.concurrency} sequences at a time are in progress", BUSY_S
            )
        tokens = _refilled(usage.tokens, tenant.tokens_per_minute, tenant.burst_seconds, now_s)
        usage.tokens = tokens
        if tokens is not None and tokens.level <= 0.0:
            wait_s = tokens.wait_s(1.0, tenant.tokens_per_minute)
            return LimitExceeded(f"more than {tenant.tokens_per_minute:g} tokens per minute", wait_s)
        requests = _refilled(usage.requests, tenant.requests_per_minute, tenant.burst_seconds, now_s)
        usage.requests = requests
        if requests is not None and requests.level < sequences:
            reason = f"more than {tenant.requests_per_minute:g} requests per minute"
            capacity = _capacity(tenant.requests_per_minute, tenant.burst_seconds)
            if sequences > capacity:
                return LimitExceeded(f"{reason}, or {capacity:g} at once, of which this is {sequences}", 0)
            return LimitExceeded(reason, requests.wait_s(sequences, tenant.requests_per_minute))
        return None

    def begin(self, tenant: Tenant, now_s: float, sequences: int = 1) -> LimitExceeded | None:
        """Count a request of so many sequences until `end`; return why it is refused, in which case it is not
        counted, or None.

        Tokens are charged once they are known (`charge`): a tenant that has overdrawn waits until the quota
        has caught up.
        """
        refused = self.refusal(tenant, now_s, sequences)
        if refused is not None:
            return refused
        usage = self._by_tenant[tenant.name]
        if usage.requests is not None:
            usage.requests.level -= sequences
        usage.running += sequences
        return None

    def charge(self, tenant: Tenant, tokens: int, now_s: float) -> None:
        """Charge tokens that were read and generated."""
        usage = self._by_tenant.setdefault(tenant.name, _Usage())
        usage.tokens = _refilled(usage.tokens, tenant.tokens_per_minute, tenant.burst_seconds, now_s)
        if usage.tokens is not None:
            usage.tokens.level -= tokens

    def end(self, tenant: Tenant, sequences: int = 1) -> None:
        """End sequences that `begin` counted."""
        self._by_tenant[tenant.name].running -= sequences

    def running(self, tenant: Tenant) -> int:
        """Return the number of sequences in progress."""
        usage = self._by_tenant.get(tenant.name)
        return 0 if usage is None else usage.running


def _refilled(bucket: _Bucket | None, per_minute: float, burst_s: float, now_s: float) -> _Bucket | None:
    """Return the bucket refilled until now; None without a limit."""
    if not per_minute:
        return None
    capacity = _capacity(per_minute, burst_s)
    if bucket is None:
        return _Bucket(capacity, now_s)
    bucket.refill(per_minute, capacity, now_s)
    return bucket


def _capacity(per_minute: float, burst_s: float) -> float:
    # However small the quota, one request may be saved up for, or none would ever be admitted.
    return max(1.0, per_minute * burst_s / _MINUTE_S)


# The ledger of requests' bodies: how many bytes of them are held, and how many are still arriving. Pure.
#
# A body's announced size counts from the start, and what a request holds counts until it ends. With tenants,
# one of them may hold half of everything, so that there is room for the others.


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


MAX_ARRIVING: Final = 1_024
"""Bodies that may be arriving at an API server or an edge at a time."""


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
