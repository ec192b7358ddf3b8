"""One Export stream as seen by the source."""

from __future__ import annotations

import asyncio
from collections import deque

from tailrace.v1 import worker_pb2
from worker_agent.migration.inbox import Broken, Inbox


class Lease:
    """Connect an export to its stream: commands come in and events go out until either end closes it."""

    def __init__(self) -> None:
        self.inbox = Inbox()
        # One per reply; the target waits for each.
        self._events: deque[worker_pb2.ExportEvent] = deque()
        self._changed = asyncio.Event()
        self._closed = False
        self._broken = False

    def send(self, event: worker_pb2.ExportEvent) -> None:
        """Send to the target if it is still there."""
        if not self._broken and not self._closed:
            self._events.append(event)
            self._changed.set()

    def close(self) -> None:
        """Close after the remaining events have been sent."""
        self._closed = True
        self._changed.set()

    def break_off(self, reason: str) -> None:
        """Record that the target's end of the stream is gone."""
        if not self._broken:
            self._broken = True
            self.inbox.signal(Broken(reason))
            self._changed.set()

    async def next_event(self) -> worker_pb2.ExportEvent | None:
        """Return the next event to write, or None at the end."""
        while not self._events:
            if self._closed or self._broken:
                return None
            self._changed.clear()
            await self._changed.wait()
        return self._events.popleft()
