"""Tells the cluster to the instances of which models this front end is connected: its record in etcd."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

import msgspec

from tailrace.records import ServiceRecord
from tailrace.store.client import StoreUnavailable
from tailrace.store.registration import Registration

log = logging.getLogger(__name__)

# Between two writes: a front end that starts connects to one instance after the other.
_PAUSE_S: Final = 0.2
# Without etcd.
_RETRY_S: Final = 1.0


class Announcer:
    """Writes the record when the models have changed; what changes meanwhile goes into the next write."""

    def __init__(self, registration: Registration, record: ServiceRecord) -> None:
        self._registration = registration
        self._record = record
        self._models: frozenset[str] = frozenset()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin; `close` ends it."""
        self._task = asyncio.create_task(self._run(), name="announces models")

    async def close(self) -> None:
        """Write no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    def set_models(self, models: frozenset[str]) -> None:
        """Keys of the models that are to be told. Does not wait."""
        if models != self._models:
            self._models = models
            self._changed.set()

    async def _run(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            record = msgspec.structs.replace(self._record, connected_models=sorted(self._models))
            try:
                await self._registration.update(msgspec.json.encode(record))
                await asyncio.sleep(_PAUSE_S)
            except StoreUnavailable as error:
                log.warning("etcd does not know which models can be reached from here: %s", error)
                # The registration has the value, and puts it once etcd is back; it may be outdated by then.
                self._changed.set()
                await asyncio.sleep(_RETRY_S)
