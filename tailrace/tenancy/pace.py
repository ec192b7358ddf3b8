"""Leave other tenants most of what all share, however many requests one of them sends."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Final

from tailrace.tenancy.meter import LimitExceeded

ALONE_AFTER_S: Final = 1.0
"""A tenant is alone once no other one has sent a request for so long."""
TENANT_SHARE: Final = 0.25
"""Share of an event loop's time that one tenant's requests may take while another's come."""
# A client that is told to come back costs less than one that waits longer.
_WAIT_MAX_S: Final = 10.0
# At an edge, each request that waits has one of Envoy's connections to it.
_WAITING_MAX, _OF_ONE_MAX = 1_536, 512


class Arrivals:
    """When the newest requests came, and whose they are."""

    def __init__(self) -> None:
        self._newest = ""
        self._newest_s = self._other_s = -ALONE_AFTER_S

    def came(self, tenant: str, now_s: float) -> None:
        """Count a request."""
        if tenant != self._newest:
            self._newest, self._other_s = tenant, self._newest_s
        self._newest_s = now_s

    def are_of_others(self, tenant: str, now_s: float) -> bool:
        """Return whether another tenant has sent a request of late."""
        other_s = self._other_s if tenant == self._newest else self._newest_s
        return now_s - other_s < ALONE_AFTER_S


class Pace:
    """The times at which tenants' next requests may begin."""

    def __init__(self) -> None:
        self._arrivals = Arrivals()
        # By tenant, by the event loop's time.
        self._next_s: dict[str, float] = {}
        self._waiting: Counter[str] = Counter()

    async def wait(self, tenant: str, cost_s: float) -> LimitExceeded | None:
        """Wait until a request that takes `cost_s` of the shared time may begin; at once if the tenant is
        alone. Return why it has to come back instead, or None."""
        now_s = asyncio.get_running_loop().time()
        self._arrivals.came(tenant, now_s)
        begin_s = max(now_s, self._next_s.get(tenant, now_s))
        if not self._arrivals.are_of_others(tenant, now_s):
            self._next_s.pop(tenant, None)
            return None
        full = self._waiting[tenant] >= _OF_ONE_MAX or self._waiting.total() >= _WAITING_MAX
        if begin_s - now_s > _WAIT_MAX_S or (begin_s > now_s and full):
            reason = "more requests at once than leave other clients their share"
            return LimitExceeded(reason, max(1, int(begin_s - now_s)))
        self._next_s[tenant] = begin_s + cost_s / TENANT_SHARE
        if begin_s > now_s:
            self._waiting[tenant] += 1
            try:
                await asyncio.sleep(begin_s - now_s)
            finally:
                self._waiting[tenant] -= 1
        return None
