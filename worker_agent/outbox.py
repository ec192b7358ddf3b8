"""What waits to be sent to one front end."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from tailrace.v1 import worker_pb2

# Some ten seconds of steps of a fast engine.
_MESSAGES_MAX: Final = 4096
_BYTES_MAX: Final = 64 << 20


class OutboxFull(Exception):
    """The front end does not read what it is sent."""


class Outbox:
    """A bounded queue with one reader. Sizes in bytes, as told by those who put."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[worker_pb2.AttachDown, int]] = deque()
        self._bytes = 0
        self._filled = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, message: worker_pb2.AttachDown, size: int = 0) -> None:
        """Queue a message; never waits. Raises OutboxFull."""
        if len(self._waiting) >= _MESSAGES_MAX or self._bytes > _BYTES_MAX:
            raise OutboxFull(f"{len(self._waiting)} messages of {self._bytes} bytes unread")
        self._waiting.append((message, size))
        self._bytes += size
        self._filled.set()

    async def get(self) -> worker_pb2.AttachDown:
        """The next message; waits for one."""
        while not self._waiting:
            self._filled.clear()
            await self._filled.wait()
        message, size = self._waiting.popleft()
        self._bytes -= size
        return message
