"""Manage all exports of a worker."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from tailrace.service.tasks import cancel, task_error
from tailrace.telemetry.incidents import loop_failed, loop_named
from worker_agent.engine.base import RequestKey
from worker_agent.migration.inbox import Ended, Owned, Released
from worker_agent.migration.lease import Lease
from worker_agent.migration.parts import SourceParts
from worker_agent.migration.source import Export

log = logging.getLogger(__name__)

_LOOP: Final = loop_named("exports")


class Exports:
    """Run each export in a task of its own that outlives its stream."""

    def __init__(self, parts: SourceParts) -> None:
        self._parts = parts
        self._running: dict[Export, asyncio.Task[None]] = {}
        parts.front_ends.on_gone(self._client_gone)

    def __len__(self) -> int:
        return len(self._running)

    def start(self, lease: Lease) -> None:
        """Start to serve a new export stream."""
        export = Export(self._parts, lease)
        task = asyncio.create_task(export.run(), name="export")
        self._running[export] = task
        task.add_done_callback(lambda done: self._done(export, done))

    async def close(self) -> None:
        """Cancel all; a paused request resumes, or ends with the engine."""
        await cancel(*self._running.values())

    def open(self, key: RequestKey) -> bool:
        """Return whether this request is being exported."""
        return self._find(key) is not None

    # ---- messages of the front end

    def handle_release(self, key: RequestKey, epoch: int) -> bool:
        """Release an exported request; return False if it is not being exported in that epoch."""
        export = self._find(key)
        if export is None or export.epoch != epoch or export.decided:
            return False
        export.lease.inbox.signal(Released())
        return True

    def handle_ownership(self, key: RequestKey, epoch: int, current: bool) -> None:
        """Pass on the reply to an OwnershipQuery."""
        export = self._find(key)
        if export is not None and export.epoch == epoch:
            export.lease.inbox.signal(Owned(current))

    def request_aborted(self, key: RequestKey) -> None:
        """End the export of a request that the front end has aborted."""
        export = self._find(key)
        if export is not None:
            export.lease.inbox.signal(Ended("the request was aborted"))

    def _client_gone(self, client: int) -> None:
        for export in self._running:
            if export.key is not None and export.key.client == client:
                export.lease.inbox.signal(Ended("its front end is gone"))

    def _find(self, key: RequestKey) -> Export | None:
        return next((export for export in self._running if export.key == key), None)

    def _done(self, export: Export, task: asyncio.Task[None]) -> None:
        del self._running[export]
        if (error := task_error(task)) is not None:
            loop_failed(_LOOP, "", error)
