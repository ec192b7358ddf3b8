"""One Export stream as the source sees it."""

from __future__ import annotations

import asyncio
from collections import deque

from tailrace.v1 import worker_pb2
from worker_agent.migration.inbox import Broken, Inbox


class Lease:
    """The target's hold on an export: commands come in, events go out, until either end lets go."""

    def __init__(self) -> None:
        self.inbox = Inbox()
        # One an answer; the target waits for each.
        self._events: deque[worker_pb2.ExportEvent] = deque()
        self._changed = asyncio.Event()
        self._closed = False
        self._broken = False

    def send(self, event: worker_pb2.ExportEvent) -> None:
        """To the target, if it is still there."""
        if not self._broken and not self._closed:
            self._events.append(event)
            self._changed.set()

    def close(self) -> None:
        """The export is over; what was sent still goes out."""
        self._closed = True
        self._changed.set()

    def break_off(self, reason: str) -> None:
        """The stream ended at the target's end."""
        if not self._broken:
            self._broken = True
            self.inbox.signal(Broken(reason))
            self._changed.set()

    async def next_event(self) -> worker_pb2.ExportEvent | None:
        """What to write next; None at the end."""
        while not self._events:
            if self._closed or self._broken:
                return None
            self._changed.clear()
            await self._changed.wait()
        return self._events.popleft()
