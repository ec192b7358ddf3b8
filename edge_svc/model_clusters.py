"""Follow the front ends of models that have a cluster of their own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Final

from edge_svc.directory import Directory, directory
from tailrace.records import AdapterRecord, ServiceRecord
from tailrace.service.tasks import supervised
from tailrace.store.reading import UnreadableRecord, read_named
from tailrace.store.store import Store
from tailrace.telemetry.incidents import unreadable

_FRONT_ENDS: Final = "services/frontend/"
_ADAPTERS: Final = "adapters/"

_Record = ServiceRecord | AdapterRecord


class ModelClusters:
    """The directories of all clusters that belong to the edge's own (`CLUSTER.NAME`), by one watch: a model
    that comes or goes restarts no edge."""

    def __init__(self, store: Store, changed: Callable[[], None]) -> None:
        """`changed` is called after each change."""
        self._store = store
        self._changed = changed
        self._first = asyncio.Event()
        # What was read by key, with the bytes that it was read from; None: they are unreadable.
        self._read: dict[str, tuple[bytes, _Record | None]] = {}
        # In the order of the clusters' names.
        self.directories: tuple[Directory, ...] = ()

    @asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Follow them during the block, which begins once they have been read."""
        async with supervised({"model clusters": self._follow}):
            await self._first.wait()
            yield

    async def _follow(self) -> None:
        async with aclosing(self._store.watch_below()) as changes:
            async for values in changes:
                self._apply(values)
                self._first.set()
                self._changed()

    def _apply(self, values: Mapping[str, bytes]) -> None:
        wanted = {}
        for key, value in values.items():
            cluster, _, name = key.partition("/")
            if name.startswith((_FRONT_ENDS, _ADAPTERS)):
                wanted[key] = cluster, name, value
        self._read = {key: self._record(key, name, value) for key, (_, name, value) in wanted.items()}
        by_cluster: dict[str, list[_Record]] = {}
        for key, (cluster, _, _) in wanted.items():
            if (record := self._read[key][1]) is not None:
                by_cluster.setdefault(cluster, []).append(record)
        self.directories = tuple(_directory(records) for _, records in sorted(by_cluster.items()))

    def _record(self, key: str, name: str, value: bytes) -> tuple[bytes, _Record | None]:
        """Return the record at a key, as it was read before if it is the same."""
        known = self._read.get(key)
        if known is not None and known[0] == value:
            return known
        try:
            if name.startswith(_ADAPTERS):
                return value, read_named(AdapterRecord, name, value)
            return value, read_named(ServiceRecord, name, value)
        except UnreadableRecord as error:
            unreadable(f"{name.partition('/')[0]} record", key, error)
            return value, None


def _directory(records: Iterable[_Record]) -> Directory:
    services = [each for each in records if isinstance(each, ServiceRecord)]
    return directory(services, [each for each in records if isinstance(each, AdapterRecord)])
