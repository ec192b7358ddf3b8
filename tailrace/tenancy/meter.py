"""What a tenant has taken, and whether it may take more. No clock: the time is given."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from tailrace.tenancy.book import Tenant

_MINUTE_S: Final = 60.0
# While requests under way are what is too many, nobody knows when one ends.
_BUSY_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Excess:
    """Why a request is refused now, and in how many seconds it is worth trying again."""

    reason: str
    retry_after_s: int


@dataclass(slots=True)
class _Bucket:
    """A minute's worth, filled evenly. May be overdrawn by what is known only afterwards."""

    level: float
    filled_s: float

    def fill(self, per_minute: float, now_s: float) -> None:
        gained = (now_s - self.filled_s) * per_minute / _MINUTE_S
        self.level = min(per_minute, self.level + max(0.0, gained))
        self.filled_s = max(self.filled_s, now_s)

    def wait_s(self, least: float, per_minute: float) -> int:
        """Seconds until there is so much."""
        return max(1, math.ceil((least - self.level) * _MINUTE_S / per_minute))


@dataclass(slots=True)
class _Taken:
    running: int = 0
    requests: _Bucket | None = None
    tokens: _Bucket | None = None


@dataclass(slots=True)
class Meter:
    """Of all tenants. A tenant's limits may change from one request to the next."""

    _by_tenant: dict[str, _Taken] = field(default_factory=dict)

    def begin(self, tenant: Tenant, now_s: float) -> Excess | None:
        """Count a request in; `end` counts it out. Not None: it is refused, and not counted.

        Tokens are charged by `charge`, when they are known: a tenant that has overdrawn waits until its
        minute has made up for it.
        """
        taken = self._by_tenant.setdefault(tenant.name, _Taken())
        if tenant.concurrency and taken.running >= tenant.concurrency:
            return Excess(f"{tenant.concurrency} requests are under way", math.ceil(_BUSY_S))
        tokens = _filled(taken.tokens, tenant.tokens_per_minute, now_s)
        taken.tokens = tokens
        if tokens is not None and tokens.level <= 0.0:
            wait_s = tokens.wait_s(1.0, tenant.tokens_per_minute)
            return Excess(f"more than {tenant.tokens_per_minute:g} tokens a minute", wait_s)
        requests = _filled(taken.requests, tenant.requests_per_minute, now_s)
        taken.requests = requests
        if requests is not None:
            if requests.level < 1.0:
                wait_s = requests.wait_s(1.0, tenant.requests_per_minute)
                return Excess(f"more than {tenant.requests_per_minute:g} requests a minute", wait_s)
            requests.level -= 1.0
        taken.running += 1
        return None

    def charge(self, tenant: Tenant, tokens: int, now_s: float) -> None:
        """So many tokens were read and made."""
        taken = self._by_tenant.setdefault(tenant.name, _Taken())
        taken.tokens = _filled(taken.tokens, tenant.tokens_per_minute, now_s)
        if taken.tokens is not None:
            taken.tokens.level -= tokens

    def end(self, tenant: Tenant) -> None:
        """A request that began is over."""
        self._by_tenant[tenant.name].running -= 1

    def running(self, tenant: Tenant) -> int:
        """Requests under way."""
        taken = self._by_tenant.get(tenant.name)
        return 0 if taken is None else taken.running


def _filled(bucket: _Bucket | None, per_minute: float, now_s: float) -> _Bucket | None:
    """None: there is no limit."""
    if not per_minute:
        return None
    if bucket is None:
        # A minute's worth may be taken at once, and one request always.
        return _Bucket(max(1.0, per_minute), now_s)
    bucket.fill(max(1.0, per_minute), now_s)
    return bucket
