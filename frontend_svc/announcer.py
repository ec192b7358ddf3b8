"""Publish in etcd which models this front end is connected to, and whether its API server is asleep."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

import msgspec

from tailrace.records import ServiceRecord
from tailrace.service.tasks import cancel, supervise
from tailrace.store.client import StoreUnavailable
from tailrace.store.registration import Registration

log = logging.getLogger(__name__)

# Pause between two writes: a starting front end connects to one instance after the other.
_PAUSE_S: Final = 0.2
# Pause between attempts while etcd cannot be reached.
_RETRY_S: Final = 1.0


class Announcer:
    """Write the front end's record when it changes; changes during a write go into the next one."""

    def __init__(self, registration: Registration, record: ServiceRecord) -> None:
        self._registration = registration
        self._record = record
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the task; `close` ends it."""
        self._task = supervise("announces the front end", self._run)

    async def close(self) -> None:
        """Stop writing."""
        if self._task is not None:
            await cancel(self._task)
            self._task = None

    def set_models(self, models: frozenset[str]) -> None:
        """Set the model keys to publish. Does not wait."""
        self._publish(msgspec.structs.replace(self._record, connected_models=sorted(models)))

    def woke(self) -> None:
        """Publish that the API server answers. Does not wait."""
        self._publish(msgspec.structs.replace(self._record, asleep=False))

    def _publish(self, record: ServiceRecord) -> None:
        if record != self._record:
            self._record = record
            self._changed.set()

    async def _run(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self._registration.update(msgspec.json.encode(self._record))
                await asyncio.sleep(_PAUSE_S)
            except StoreUnavailable as error:
                log.warning("cannot publish this front end to etcd: %s", error)
                # The registration writes its value again once etcd is back; by then it may be outdated.
                self._changed.set()
                await asyncio.sleep(_RETRY_S)
            except Exception:
                self._changed.set()
                raise
