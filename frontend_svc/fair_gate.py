"""Hold new requests back while enough prompts are waiting for prefill, and admit them tenant by tenant.

An engine serves what it has in its own order, so a tenant's burst that is already there goes first, whatever
arrives later. Therefore engines get a bounded backlog only, and the rest waits here in a fair queue.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from frontend_svc.admission import NO_INSTANCE, NO_TURN, TENANT_FULL, Refused
from frontend_svc.streams import Stream
from tailrace.telemetry.metrics import counter_by, gauge_by
from tailrace.tenancy.fair_queue import FairQueue, Queued, TenantQueueFull
from tailrace.tenancy.keys import Share


@dataclass(slots=True)
class _Waiting:
    entry: Queued[Stream]
    # Set when its turn has come.
    admitted: asyncio.Event


class FairGate:
    """Admit requests in fair order while the backlog has room.

    The backlog is the prompt tokens of admitted requests without a first token. Every new request is queued,
    and is admitted at once if there is room, so that a tenant's usage counts even when nobody waits. One
    request may exceed the backlog: otherwise the largest prompts would never be admitted.
    """

    def __init__(
        self,
        backlog_tokens: int,
        max_waiting: int,
        patience_s: float,
        observe_wait: Callable[[float], None],
    ) -> None:
        """`backlog_tokens`: prompt tokens per instance; `max_waiting`: requests of one tenant, each for
        `patience_s` seconds.

        `observe_wait` is called with the seconds that an admitted request waited.
        """
        self._per_instance = backlog_tokens
        self._patience_s = patience_s
        self._observe_wait = observe_wait
        self._instances = 0
        self._max_waiting = max_waiting
        self._queue = FairQueue[Stream](max_waiting)
        self._waiting: dict[int, _Waiting] = {}
        # Costs of admitted requests in tokens, by handle.
        self._admitted: dict[int, int] = {}
        self.backlog_tokens = 0
        # Requests that were not admitted: the tenant's queue was "full", or the "deadline" passed.
        self.refused = Counter({"full": 0, "deadline": 0})

    def __len__(self) -> int:
        """Count waiting requests."""
        return len(self._queue)

    @property
    def limit_tokens(self) -> int:
        """Return the backlog, in prompt tokens, at which requests begin to wait."""
        return self._per_instance * self._instances

    def waiting(self) -> dict[str, int]:
        """Return the number of waiting requests of each tenant that has any."""
        return self._queue.waiting()

    def full(self) -> list[str]:
        """Return the tenants whose next request would be refused."""
        return sorted(name for name, count in self.waiting().items() if count >= self._max_waiting)

    async def turn(self, stream: Stream, share: Share, priority: int) -> None:
        """Wait for a new request's turn; its wait limit starts now. Raise Refused if it does not come.

        Whatever comes of it, `release` must follow.
        """
        try:
            entry = self._queue.push(stream, share.tenant, share.weight, _cost(stream), priority)
        except TenantQueueFull:
            self.refused["full"] += 1
            raise Refused(TENANT_FULL) from None
        waiting = self._waiting[stream.handle] = _Waiting(entry, asyncio.Event())
        self._admit()
        try:
            async with asyncio.timeout(self._patience_s):
                await waiting.admitted.wait()
        except TimeoutError:
            if not waiting.admitted.is_set():
                self.refused["deadline"] += 1
                raise Refused(NO_TURN if self._instances else NO_INSTANCE) from None

    def release(self, handle: int) -> None:
        """Free the backlog of a request that has its first token or has ended. Unknown handles are
        ignored."""
        waiting = self._waiting.pop(handle, None)
        if waiting is not None:
            self._queue.remove(waiting.entry)
        cost = self._admitted.pop(handle, 0)
        self.backlog_tokens -= cost
        if cost:
            self._admit()
        if not self._admitted and not self._queue:
            self._queue.reset()

    def set_instances(self, count: int) -> None:
        """Set how many instances accept prompts now."""
        self._instances = count
        self._admit()

    def close(self) -> None:
        """Stop admitting."""
        self._instances = 0

    def _admit(self) -> None:
        while self._queue and self.backlog_tokens < self.limit_tokens:
            entry = self._queue.pop()
            stream = entry.item
            self._waiting.pop(stream.handle).admitted.set()
            self._admitted[stream.handle] = _cost(stream)
            self.backlog_tokens += _cost(stream)
            self._observe_wait(time.monotonic() - stream.placing_since_s)


def _cost(stream: Stream) -> int:
    """Return a request's cost in tokens, at least 1: a prompt of embeddings has no tokens."""
    return max(1, stream.prompt_tokens)


# Tenants with a time series of their own; any that waits later is counted among the others for the life of
# the process, because each series costs Prometheus memory whether or not its value changes.
MAX_TENANTS: Final = 50
OTHERS: Final = "(others)"


class FairMetrics(Collector):
    """Export the state of the fair gate to Prometheus."""

    def __init__(self, registry: CollectorRegistry, gate: FairGate) -> None:
        self._gate = gate
        self._named: set[str] = set()
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """Yield the current values."""
        gate = self._gate
        yield gauge_by(
            "tailrace_frontend_fair_waiting",
            "Requests that wait for their tenant's turn.",
            "tenant",
            self._by_name(gate.waiting()),
        )
        yield GaugeMetricFamily(
            "tailrace_frontend_fair_backlog_tokens",
            "Tokens of admitted prompts without a first token.",
            value=gate.backlog_tokens,
        )
        yield GaugeMetricFamily(
            "tailrace_frontend_fair_backlog_limit_tokens",
            "Value of the above from which requests wait.",
            value=gate.limit_tokens,
        )
        yield counter_by(
            "tailrace_frontend_fair_refused", "Requests whose turn did not come.", "reason", gate.refused
        )

    def _by_name(self, waiting: dict[str, int]) -> Counter[str]:
        counts: Counter[str] = Counter(dict.fromkeys(self._named, 0))
        for tenant, count in waiting.items():
            if tenant not in self._named and len(self._named) < MAX_TENANTS:
                self._named.add(tenant)
            counts[tenant if tenant in self._named else OTHERS] += count
        return counts
