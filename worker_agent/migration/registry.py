"""All imports and exports of a worker, each in a task of its own."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from tailrace.handover import SETTLE_S
from tailrace.service.tasks import cancel, task_error
from tailrace.telemetry.incidents import loop_failed, loop_named
from tailrace.v1 import worker_pb2
from worker_agent.engine.base import RequestKey, Submission
from worker_agent.migration.export_call import Ended, Lease, Owned, Released, SourceLink
from worker_agent.migration.source import Export, SourceParts
from worker_agent.migration.target import Import, TargetParts

_IMPORT_LOOP: Final = loop_named("imports")
# The migration service limits imports; this only keeps a faulty one from filling the worker.
_IMPORTS_MAX: Final = 32
# Imports that have ended, of which a migration service may still ask how.
_ENDED_MAX: Final = 1_024


class ImportRefused(Exception):
    """An import that cannot begin; the message says why."""


class Imports:
    """Run each import in a task of its own that outlives the migration service's call."""

    def __init__(self, parts: TargetParts, connect: Callable[[str, float], SourceLink]) -> None:
        """`connect(address, seconds)` opens an export at a source, with this deadline."""
        self._parts = parts
        self._connect = connect
        self._running: dict[Import, asyncio.Task[None]] = {}
        # The last event of each import that has ended, by migration.
        self._ended: OrderedDict[str, worker_pb2.ImportEvent] = OrderedDict()
        # Why no import may begin; empty if they may.
        self._refusal = ""
        parts.front_ends.on_gone(self._client_gone)

    def __len__(self) -> int:
        return len(self._running)

    @property
    def with_room(self) -> int:
        """Return the number of imports whose KV is reserved and so included in the KV usage that the
        scheduler sees."""
        return sum(incoming.reserved for incoming in self._running)

    def start(self, request: worker_pb2.ImportRequest) -> Import:
        """Begin an import. Raise ImportRefused."""
        if self._refusal:
            raise ImportRefused(self._refusal)
        if refusal := self._parts.own.refusal(request.target_instance_id, request.target_incarnation):
            raise ImportRefused(refusal)
        if not request.migration_id or not request.request_id or not request.source_address:
            raise ImportRefused("migration_id, request_id and source_address must be given")
        if request.epoch <= request.from_epoch:
            raise ImportRefused(f"epoch {request.epoch} is not after {request.from_epoch}")
        if len(self._running) >= _IMPORTS_MAX:
            raise ImportRefused(f"{_IMPORTS_MAX} imports are running")
        if self._named(request.request_id) is not None or self._migration(request.migration_id) is not None:
            raise ImportRefused(f"{request.request_id} is being imported already")
        timeout_s = request.timeout_s or self._parts.settings.import_timeout_s
        timeout_s += max(0.0, request.room_wait_s) + SETTLE_S
        source = self._connect(request.source_address, timeout_s)
        incoming = Import(self._parts, request, source)
        task = asyncio.create_task(incoming.run(), name=f"import {request.request_id}")
        self._running[incoming] = task
        task.add_done_callback(lambda done: self._done(incoming, done))
        return incoming

    def reserved(self, request_id: str) -> bool:
        """Return whether the engine has reserved blocks for a request that is being imported."""
        incoming = self._named(request_id)
        return incoming is not None and incoming.reserved

    def refuse(self, reason: str) -> None:
        """Begin no more imports, and abort those that can be aborted: their sources resume."""
        self._refusal = reason
        for incoming in self._running:
            incoming.cancel(reason)

    async def cancel(self, migration_id: str) -> worker_pb2.ImportEvent | None:
        """Abort an import unless it is being committed, wait for its end and return its last event; None if
        there was no such import, or if it ended long ago."""
        incoming = self._migration(migration_id)
        if incoming is not None:
            incoming.cancel("cancelled by the migration service")
            await incoming.over.wait()
            return incoming.last_event
        return self._ended.get(migration_id)

    async def close(self) -> None:
        """Cancel all."""
        await cancel(*self._running.values())

    # ---- messages of the front end

    def handle_adopt_reply(self, reply: worker_pb2.AdoptReply) -> None:
        """Pass on an AdoptReply."""
        incoming = self._migration(reply.migration_id)
        if incoming is not None:
            incoming.answer(reply)

    def supersede_by(self, submission: Submission) -> bool:
        """Keep a submission until an import of the same request has ended; return False if there is none."""
        incoming = self._named(submission.request_id)
        return incoming is not None and incoming.supersede_by(submission)

    def request_aborted(self, key: RequestKey) -> None:
        """Cancel imports of a request that the front end has aborted."""
        for incoming in self._running:
            incoming.request_aborted(key)

    def concerns(self, key: RequestKey) -> bool:
        """Return whether this request is being imported, or was submitted and waits for the end of an
        import."""
        return any(incoming.concerns(key) for incoming in self._running)

    def _client_gone(self, client: int) -> None:
        for incoming in self._running:
            incoming.client_gone(client)

    def _named(self, request_id: str) -> Import | None:
        return next((incoming for incoming in self._running if incoming.request_id == request_id), None)

    def _migration(self, migration_id: str) -> Import | None:
        return next((incoming for incoming in self._running if incoming.migration_id == migration_id), None)

    def _done(self, incoming: Import, task: asyncio.Task[None]) -> None:
        del self._running[incoming]
        self._ended[incoming.migration_id] = incoming.last_event
        while len(self._ended) > _ENDED_MAX:
            self._ended.popitem(last=False)
        if (error := task_error(task)) is not None:
            loop_failed(_IMPORT_LOOP, incoming.request_id, error)


_EXPORT_LOOP: Final = loop_named("exports")


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
        if export is None or export.epoch != epoch:
            return False
        if export.decided:
            # Its target may have reported the commit before.
            return export.releases
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
            loop_failed(_EXPORT_LOOP, "", error)
