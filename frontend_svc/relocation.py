"""Streams that their instance hands back: they go on elsewhere, computed anew, once there is a place.

The instance drains, and has no KV of them or no time left. Until another instance takes a stream it stays
where it is; then it is taken from its owner in one step, and what that still sends for it has an old epoch.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from typing import Protocol

from frontend_svc.outbox import Outbox, abort
from frontend_svc.placement import Placed, Placement
from frontend_svc.streams import Stream, StreamTable
from tailrace.service.failure import failure
from tailrace.v1 import worker_pb2

log = logging.getLogger(__name__)


class Submitter(Protocol):
    """What brings streams onto instances (dispatch.Dispatch)."""

    def submit(self, stream: Stream, instance_id: str, pull: worker_pb2.Pull | None = None) -> bool:
        """Give an orphan to an instance; False when that does not answer now. `pull`: as in Placed."""

    def start(self, stream: Stream, avoid: frozenset[str] = frozenset()) -> None:
        """Find an instance for an orphan."""


class RelocationSink(Protocol):
    """What is told of each stream that moves."""

    def on_handed_back(self, stream: Stream, instance_id: str) -> None:
        """It was taken from this instance."""

    def on_placed(self, stream: Stream, placed: Placed, seconds: float) -> None:
        """It was submitted to another one, `seconds` after it was handed back."""


class Relocations:
    """One task a stream that is handed back, and at most one for each."""

    def __init__(
        self,
        table: StreamTable,
        placement: Placement,
        outbox: Outbox,
        dispatch: Submitter,
        sink: RelocationSink,
    ) -> None:
        self._table = table
        self._placement = placement
        self._outbox = outbox
        self._dispatch = dispatch
        self._sink = sink
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def hand_back(self, instance_id: str, message: worker_pb2.HandBack) -> None:
        """An instance asks for streams to be placed elsewhere; those that it does not own are ignored."""
        for handle, epoch in zip(message.handles, message.epochs, strict=False):
            stream = self._table.get(handle)
            if stream is None or handle in self._tasks or not _owns(instance_id, epoch, stream):
                continue
            task = asyncio.create_task(self._move(stream, instance_id), name=f"relocate {stream.request_id}")
            self._tasks[handle] = task
            task.add_done_callback(partial(self._done, handle))

    async def close(self) -> None:
        """Cancel everything under way."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _move(self, stream: Stream, instance_id: str) -> None:
        began_s, epoch, avoid = time.monotonic(), stream.epoch, frozenset({instance_id})
        chosen = await self._placement.choose(stream, avoid)
        if not self._table.is_live(stream) or not _owns(instance_id, epoch, stream):
            return
        if not isinstance(chosen, Placed) or chosen.instance_id == instance_id:
            log.debug("%s stays on %s, which hands it back", stream.request_id, instance_id)
            return
        self._table.orphan(stream)
        self._outbox.send(instance_id, abort([stream.handle]))
        self._sink.on_handed_back(stream, instance_id)
        if self._dispatch.submit(stream, chosen.instance_id, chosen.pull):
            self._sink.on_placed(stream, chosen, time.monotonic() - began_s)
        else:
            self._dispatch.start(stream, avoid)

    def _done(self, handle: int, task: asyncio.Task[None]) -> None:
        del self._tasks[handle]
        if (error := failure(task)) is not None:
            # The stream is where it was.
            log.error("relocating a stream failed", exc_info=error)


def _owns(instance_id: str, epoch: int, stream: Stream) -> bool:
    return stream.owner == instance_id and stream.epoch == epoch
