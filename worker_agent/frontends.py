"""The front ends that are attached to this worker."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterator
from typing import Final, Protocol

from tailrace.service.message_stream import StreamBroken
from tailrace.v1 import worker_pb2

log = logging.getLogger(__name__)

# Minutes of steps of a fast engine.
_UNSENT_BYTES_MAX: Final = 16 << 20


class Downstream(Protocol):
    """The way to a front end (tailrace/service/message_stream.py)."""

    def send(self, message: worker_pb2.AttachDown) -> None:
        """Send; never waits. Any thread. Raises StreamBroken."""

    @property
    def unsent_bytes(self) -> int:
        """Bytes that wait for the front end to read."""


class FrontEnd:
    """One stream's front end, from its hello to the stream's end."""

    def __init__(self, client: int, frontend_id: str, incarnation: str, down: Downstream) -> None:
        # Its slot: a number of its own in the engine, never used again.
        self.client = client
        self.frontend_id = frontend_id
        self.incarnation = incarnation
        self._down = down
        self._loop = asyncio.get_running_loop()
        self.closed = asyncio.Event()
        self.reason = ""
        self.heard_s = time.monotonic()

    def send(self, message: worker_pb2.AttachDown) -> bool:
        """Send a message; False when the stream is over. Any thread, never waits. A front end that does not
        read is cut: it must hold up neither the engine nor other front ends."""
        if self.closed.is_set():
            return False
        try:
            self._down.send(message)
        except StreamBroken as error:
            self._loop.call_soon_threadsafe(self.cut, str(error))
            return False
        if self._down.unsent_bytes > _UNSENT_BYTES_MAX:
            self._loop.call_soon_threadsafe(self.cut, f"{self._down.unsent_bytes} bytes unread")
        return True

    @property
    def reads(self) -> bool:
        """Whether nothing waits for it to read."""
        return self._down.unsent_bytes == 0

    def cut(self, reason: str) -> None:
        """End the stream from this side. On the event loop."""
        if not self.closed.is_set():
            self.reason = reason
            self.closed.set()


class FrontEnds:
    """All that are attached; at most one stream a front end."""

    def __init__(self) -> None:
        self._slots = itertools.count()
        self._by_client: dict[int, FrontEnd] = {}
        self._by_id: dict[str, FrontEnd] = {}
        self._gone: list[Callable[[int], None]] = []

    def __iter__(self) -> Iterator[FrontEnd]:
        return iter(list(self._by_client.values()))

    def __len__(self) -> int:
        return len(self._by_client)

    def on_gone(self, callback: Callable[[int], None]) -> None:
        """Call back with the slot of every front end whose stream has ended."""
        self._gone.append(callback)

    def attach(self, frontend_id: str, incarnation: str, down: Downstream) -> FrontEnd:
        """A new stream. An older one of the same front end is cut and forgotten first."""
        older = self._by_id.get(frontend_id)
        if older is not None:
            older.cut("attached anew")
            self.detach(older)
        front_end = FrontEnd(next(self._slots), frontend_id, incarnation, down)
        self._by_client[front_end.client] = self._by_id[frontend_id] = front_end
        log.info("front end %s attached (slot %d)", frontend_id, front_end.client)
        return front_end

    def detach(self, front_end: FrontEnd) -> None:
        """Its stream has ended; everything it had here ends with it. Does nothing the second time."""
        if self._by_client.pop(front_end.client, None) is None:
            return
        if self._by_id.get(front_end.frontend_id) is front_end:
            del self._by_id[front_end.frontend_id]
        front_end.cut("the stream ended")
        log.info("front end %s detached: %s", front_end.frontend_id, front_end.reason)
        for callback in self._gone:
            callback(front_end.client)

    def cut_all(self, reason: str) -> None:
        """End every stream from this side."""
        for front_end in self:
            front_end.cut(reason)

    def by_client(self, client: int) -> FrontEnd | None:
        """The one in this slot, while it is attached."""
        return self._by_client.get(client)

    def by_id(self, frontend_id: str) -> FrontEnd | None:
        """The one of this name, while it is attached."""
        return self._by_id.get(frontend_id)
