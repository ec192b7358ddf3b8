"""The front ends that are attached to this worker."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterator
from typing import Final, Protocol

from tailrace.service.message_stream import DEFAULT_MAX_MESSAGE_BYTES, StreamBroken
from tailrace.v1 import worker_pb2

log = logging.getLogger(__name__)


# A front end that takes no byte of what waits for it for so long does not read.
STALL_S: Final = 10.0
# A front end of the same id but another incarnation is refused while the older one was heard within this
# time.
_ALIVE_S: Final = 3.0
# A step's outputs up to this size are sent however much waits: many thousands of tokens.
_ALWAYS_SENT_BYTES: Final = 1 << 20
# What may wait for a front end that reads, in largest messages; beyond it, memory would be at stake.
_UNSENT_MESSAGES_MAX: Final = 4
# What a leaving worker gives front ends to close their ends.
_GOODBYE_S: Final = 1.0


class AttachRefused(Exception):
    """A front end is not served; the message says why."""


class Downstream(Protocol):
    """The way to a front end (tailrace/service/message_stream.py)."""

    def send(self, message: worker_pb2.AttachDown) -> None:
        """Send; never waits. Any thread. Raises StreamBroken."""

    @property
    def unsent_bytes(self) -> int:
        """Bytes that wait for the front end to read."""

    @property
    def received_s(self) -> float:
        """When bytes last came from it, in seconds of the monotonic clock."""

    def stalled_s(self, now_s: float) -> float:
        """For how many seconds it has taken nothing of what waits for it; 0 while nothing waits."""


class FrontEnd:
    """One stream's front end, from its hello to the stream's end."""

    def __init__(self, client: int, hello: worker_pb2.FrontendHello, down: Downstream) -> None:
        # Its slot: a number of its own in the engine, never used again.
        self.client = client
        self.frontend_id = hello.frontend_id
        self.incarnation = hello.incarnation
        self.attempt = hello.attempt
        # Largest message that it takes.
        self.max_message_bytes = hello.max_message_bytes or DEFAULT_MAX_MESSAGE_BYTES
        # Utility calls of it that the engine has not answered yet.
        self.utility_calls = 0
        self._down = down
        self._loop = asyncio.get_running_loop()
        self.closed = asyncio.Event()
        self.reason = ""
        # Seconds of the monotonic clock; moved on by as much as this process itself stood still.
        self.heard_s = time.monotonic()

    def send(self, message: worker_pb2.AttachDown) -> bool:
        """Send a message; False when the stream is over. Any thread, never waits. The message must not be
        larger than `max_message_bytes`."""
        if self.closed.is_set():
            return False
        try:
            self._down.send(message)
        except StreamBroken as error:
            self._loop.call_soon_threadsafe(self.cut, str(error))
            return False
        if self._down.unsent_bytes > _UNSENT_MESSAGES_MAX * self.max_message_bytes:
            self._loop.call_soon_threadsafe(self.cut, f"{self._down.unsent_bytes} bytes unread")
        return True

    @property
    def room_bytes(self) -> int:
        """How large a step's outputs may be now: the less, the more waits for the front end to read."""
        limit = self.max_message_bytes
        return min(limit, max(_ALWAYS_SENT_BYTES, limit - self._down.unsent_bytes))

    @property
    def reads(self) -> bool:
        """Whether nothing waits for it to read."""
        return self._down.unsent_bytes == 0

    def check(self, now_s: float, late_s: float, silence_s: float) -> None:
        """Cut it if nothing was heard of it for `silence_s` seconds, or if it takes nothing for STALL_S.
        `late_s`: for how long this process itself stood still before. On the event loop."""
        # A large message is heard while it comes in, not only once it is whole.
        self.heard_s = max(self.heard_s + late_s, self._down.received_s)
        if now_s - self.heard_s > silence_s:
            self.cut(f"silent for {now_s - self.heard_s:.1f} s")
        elif self._down.stalled_s(now_s) - late_s > STALL_S:
            self.cut(f"took nothing of {self._down.unsent_bytes} bytes for {STALL_S:g} s")

    async def wait_closed(self) -> None:
        """Until the stream is over, whoever ended it."""
        await self.closed.wait()

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
        # Once the worker leaves: why. Nobody is attached any more.
        self._leaving = ""

    def __iter__(self) -> Iterator[FrontEnd]:
        return iter(list(self._by_client.values()))

    def __len__(self) -> int:
        return len(self._by_client)

    def on_gone(self, callback: Callable[[int], None]) -> None:
        """Call back with the slot of every front end whose stream has ended."""
        self._gone.append(callback)

    def attach(self, hello: worker_pb2.FrontendHello, down: Downstream) -> FrontEnd:
        """A new stream. An older one of the same front end is cut and forgotten first.

        Raises AttachRefused when the worker leaves, when another process of the same id is attached and
        alive (two that take the place of each other would both lose all their streams, again and again),
        or when the hello is older than the stream that is attached.
        """
        if self._leaving:
            raise AttachRefused(self._leaving)
        older = self._by_id.get(hello.frontend_id)
        if older is not None:
            self._check_successor(older, hello)
            older.cut("attached anew")
            self.detach(older)
        front_end = FrontEnd(next(self._slots), hello, down)
        self._by_client[front_end.client] = self._by_id[front_end.frontend_id] = front_end
        log.info("front end %s attached (slot %d)", front_end.frontend_id, front_end.client)
        return front_end

    @staticmethod
    def _check_successor(older: FrontEnd, hello: worker_pb2.FrontendHello) -> None:
        if older.incarnation != hello.incarnation:
            if time.monotonic() - older.heard_s < _ALIVE_S:
                raise AttachRefused(
                    f"another process attached as front end {hello.frontend_id} and is alive; give each front"
                    " end an id of its own (--id)"
                )
        elif hello.attempt < older.attempt:
            raise AttachRefused("a later connection of this front end is attached")

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

    async def leave(self, goodbye: worker_pb2.Goodbye) -> None:
        """Say goodbye to all, and end their streams; who comes later is refused. Takes a second at most."""
        self.say_goodbye(goodbye)
        waiting = [asyncio.create_task(front_end.wait_closed()) for front_end in self]
        if waiting:
            # Front ends close their ends; what was sent before is not lost then.
            _, late = await asyncio.wait(waiting, timeout=_GOODBYE_S)
            for task in late:
                task.cancel()
        for front_end in self:
            front_end.cut(self._leaving)

    def say_goodbye(self, goodbye: worker_pb2.Goodbye) -> None:
        """Tell all that this worker leaves; the first reason stands."""
        if self._leaving:
            return
        self._leaving = goodbye.reason or "the worker is leaving"
        for front_end in self:
            front_end.send(worker_pb2.AttachDown(goodbye=goodbye))

    def by_client(self, client: int) -> FrontEnd | None:
        """The one in this slot, while it is attached."""
        return self._by_client.get(client)

    def by_id(self, frontend_id: str) -> FrontEnd | None:
        """The one of this name, while it is attached."""
        return self._by_id.get(frontend_id)


HEARTBEAT_S: Final = 0.5
_HEARTBEAT: Final = worker_pb2.AttachDown(heartbeat=worker_pb2.Heartbeat())


async def beat(front_ends: FrontEnds, silence_s: float) -> None:
    """Beat until cancelled; cut front ends from which nothing came for `silence_s` seconds."""
    due_s = time.monotonic()
    while True:
        due_s += HEARTBEAT_S
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        now_s = time.monotonic()
        # For as long as this process did not run (stopped, or the machine slept), nobody could be heard.
        late_s = now_s - due_s
        due_s = now_s
        for front_end in front_ends:
            front_end.check(now_s, late_s, silence_s)
            if front_end.reads:
                front_end.send(_HEARTBEAT)
