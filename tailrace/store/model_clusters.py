"""Follow the clusters that belong to one's own: those of models with a policy of their own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from tailrace.records import AdapterRecord, ServiceRecord
from tailrace.service.tasks import supervised
from tailrace.store.reading import UnreadableRecord, read_named
from tailrace.store.store import Store
from tailrace.telemetry.incidents import unreadable

SERVICES: Final = "services/"
FRONT_ENDS: Final = "services/frontend/"
ADAPTERS: Final = "adapters/"

_Record = ServiceRecord | AdapterRecord


@dataclass(frozen=True, slots=True)
class ClusterRecords:
    """What was read of one cluster."""

    services: list[ServiceRecord] = field(default_factory=list)
    adapters: list[AdapterRecord] = field(default_factory=list)


class ModelClusters:
    """Services and adapters of all clusters that belong to a store's own (`CLUSTER.NAME`), by one watch: a
    model that comes or goes restarts nobody."""

    def __init__(self, store: Store, *areas: str, changed: Callable[[], None] = lambda: None) -> None:
        """`areas`: what the keys that are read begin with. `changed` is called after each change."""
        self._store = store
        self._areas = areas
        self._changed = changed
        self._first = asyncio.Event()
        # What was read by key, with the bytes that it was read from; None: they are unreadable.
        self._read: dict[str, tuple[bytes, _Record | None]] = {}
        # By NAME, in the order of names.
        self.records: Mapping[str, ClusterRecords] = {}

    @asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Follow them during the block, which begins once they have been read."""
        async with supervised({"model clusters": self.follow}):
            await self._first.wait()
            yield

    async def follow(self) -> None:
        """Follow them until cancelled."""
        async with aclosing(self._store.watch_below()) as changes:
            async for values in changes:
                self._apply(values)
                self._first.set()
                self._changed()

    def _apply(self, values: Mapping[str, bytes]) -> None:
        wanted = {}
        for key, value in values.items():
            cluster, _, name = key.partition("/")
            if name.startswith(self._areas):
                wanted[key] = cluster, name, value
        self._read = {key: self._record(key, name, value) for key, (_, name, value) in wanted.items()}
        found: dict[str, ClusterRecords] = {}
        for key, (cluster, _, _) in wanted.items():
            record = self._read[key][1]
            if isinstance(record, ServiceRecord):
                found.setdefault(cluster, ClusterRecords()).services.append(record)
            elif record is not None:
                found.setdefault(cluster, ClusterRecords()).adapters.append(record)
        self.records = dict(sorted(found.items()))

    def _record(self, key: str, name: str, value: bytes) -> tuple[bytes, _Record | None]:
        """Return the record at a key, as it was read before if it is the same."""
        known = self._read.get(key)
        if known is not None and known[0] == value:
            return known
        try:
            if name.startswith(ADAPTERS):
                return value, read_named(AdapterRecord, name, value)
            return value, read_named(ServiceRecord, name, value)
        except UnreadableRecord as error:
            unreadable(f"{name.partition('/')[0]} record", key, error)
            return value, None
