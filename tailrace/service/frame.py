"""What every control service has around its own work: store, membership, channels, traces, metrics."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import msgspec
from prometheus_client import CollectorRegistry

from tailrace.records import ServiceRecord
from tailrace.service.channels import Channels
from tailrace.service.options import CommonOptions, fresh_incarnation
from tailrace.store.membership import Membership
from tailrace.store.registration import register
from tailrace.store.store import Store
from tailrace.telemetry.membership import MembershipMetrics
from tailrace.telemetry.metrics import new_registry, serve_metrics
from tailrace.telemetry.tracing import Tracing, configure


@dataclass(frozen=True, slots=True)
class Frame:
    """Open for as long as its block lasts."""

    kind: str
    common: CommonOptions
    store: Store
    members: Membership
    channels: Channels
    tracing: Tracing
    registry: CollectorRegistry
    metrics_address: str

    @asynccontextmanager
    async def announced(self, address: str) -> AsyncIterator[ServiceRecord]:
        """Be in etcd as a service that listens on HOST:PORT; withdrawn when the block ends."""
        record = ServiceRecord(
            kind=self.kind,
            service_id=self.common.member_id,
            incarnation=fresh_incarnation(),
            address=self.common.advertised(address),
            metrics_address=self.common.advertised(self.metrics_address),
        )
        registration = await register(
            self.store, f"services/{self.kind}/{record.service_id}", msgspec.json.encode(record)
        )
        try:
            yield record
        finally:
            await registration.withdraw()


@asynccontextmanager
async def open_frame(kind: str, common: CommonOptions) -> AsyncIterator[Frame]:
    """Connect to etcd and serve metrics. Raises StoreUnavailable; OSError when the metrics port is taken."""
    async with AsyncExitStack() as stack:
        store = await Store.connect(common.etcd, common.cluster, common.transport)
        stack.push_async_callback(store.close)
        members = await Membership.start(store)
        stack.push_async_callback(members.close)
        channels = Channels(common.transport)
        stack.push_async_callback(channels.close)
        tracing = await stack.enter_async_context(configure(kind, common.member_id))
        registry = new_registry(kind, common.member_id)
        registry.register(MembershipMetrics(members))
        metrics = await stack.enter_async_context(serve_metrics(common.metrics, registry, common.transport))
        yield Frame(kind, common, store, members, channels, tracing, registry, metrics.address)
