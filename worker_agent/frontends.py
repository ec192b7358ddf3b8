"""The front ends that are attached to this worker."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterator
from typing import Final, Protocol

from tailrace.output_flags import OutputFlag
from tailrace.service.message_stream import DEFAULT_MAX_MESSAGE_BYTES, StreamBroken
from tailrace.v1 import worker_pb2
from tailrace.wire.outputs import error_outputs

log = logging.getLogger(__name__)


# A front end that reads none of its pending bytes for this long is disconnected.
STALL_S: Final = 10.0
# A front end of the same id but another incarnation is refused while the older one sent anything within this
# time.
_ALIVE_S: Final = 3.0
# A step's outputs up to this size are sent however much is unsent: many thousands of tokens.
_ALWAYS_SENT_BYTES: Final = 1 << 20
# Unsent data for a front end, in largest messages; beyond it memory would run out.
_UNSENT_MESSAGES_MAX: Final = 4
# Time that a stopping worker gives front ends to close their ends.
_GOODBYE_S: Final = 1.0


class AttachRefused(Exception):
    """A front end is refused; the message says why."""


class Downstream(Protocol):
    """The stream to a front end (tailrace/service/message_stream.py)."""

    def send(self, message: worker_pb2.AttachDown) -> None:
        """Send without waiting, from any thread. Raise StreamBroken."""

    @property
    def unsent_bytes(self) -> int:
        """Return the bytes that the front end has not read yet."""

    @property
    def received_s(self) -> float:
        """Return when bytes last arrived from it, in seconds of the monotonic clock."""

    def stalled_s(self, now_s: float) -> float:
        """Return for how many seconds it has read none of the unsent bytes; 0 if there are none."""


def failed_here(request_id: str, handle: int, epoch: int, next_index: int) -> worker_pb2.AttachDown:
    """Return the message that the request failed here before this token; it may be tried elsewhere."""
    outputs = worker_pb2.StepOutputs(
        frames=error_outputs([request_id]),
        handles=[handle],
        epochs=[epoch],
        first_indices=[next_index],
        counts=[0],
        flags=[int(OutputFlag.FAILED)],
    )
    return worker_pb2.AttachDown(outputs=outputs)


class FrontEnd:
    """One attached front end, from its hello to the end of its stream."""

    def __init__(self, client: int, hello: worker_pb2.FrontendHello, down: Downstream) -> None:
        # Its slot: a number that identifies it in the engine and is never reused.
        self.client = client
        self.frontend_id = hello.frontend_id
        self.incarnation = hello.incarnation
        self.attempt = hello.attempt
        # Largest message that it accepts, in bytes.
        self.max_message_bytes = hello.max_message_bytes or DEFAULT_MAX_MESSAGE_BYTES
        # Its utility calls that the engine has not answered yet.
        self.utility_calls = 0
        self._down = down
        self._loop = asyncio.get_running_loop()
        self.closed = asyncio.Event()
        self.reason = ""
        # Seconds of the monotonic clock, shifted by the time for which this process itself was suspended.
        self.last_received_s = time.monotonic()

    def send(self, message: worker_pb2.AttachDown) -> bool:
        """Send a message without waiting, from any thread; return False if the stream has ended.

        The message must not exceed `max_message_bytes`.
        """
        if self.closed.is_set():
            return False
        try:
            self._down.send(message)
        except StreamBroken as error:
            self._loop.call_soon_threadsafe(self.disconnect, str(error))
            return False
        if self._down.unsent_bytes > _UNSENT_MESSAGES_MAX * self.max_message_bytes:
            self._loop.call_soon_threadsafe(self.disconnect, f"{self._down.unsent_bytes} bytes unread")
        return True

    @property
    def send_budget_bytes(self) -> int:
        """Return how large a step's outputs may be now: less the more is unsent, and at last nothing.

        Requests are then given up one by one: beyond _UNSENT_MESSAGES_MAX all of them would be lost.
        """
        limit = self.max_message_bytes
        if self._down.unsent_bytes > (_UNSENT_MESSAGES_MAX - 1) * limit:
            return 0
        return min(limit, max(_ALWAYS_SENT_BYTES, limit - self._down.unsent_bytes))

    @property
    def has_read_all(self) -> bool:
        """Return whether nothing is unsent."""
        return self._down.unsent_bytes == 0

    def check(self, now_s: float, late_s: float, silence_s: float) -> None:
        """Disconnect it if nothing arrived for `silence_s` seconds, or if it reads nothing for STALL_S.

        `late_s`: for how long this process itself was suspended. Call on the event loop.
        """
        # Bytes of a large message count when they arrive, not only once the message is complete.
        self.last_received_s = max(self.last_received_s + late_s, self._down.received_s)
        if now_s - self.last_received_s > silence_s:
            self.disconnect(f"silent for {now_s - self.last_received_s:.1f} s")
        elif self._down.stalled_s(now_s) - late_s > STALL_S:
            self.disconnect(f"took nothing of {self._down.unsent_bytes} bytes for {STALL_S:g} s")

    async def wait_closed(self) -> None:
        """Wait until the stream has ended, at either end."""
        await self.closed.wait()

    def disconnect(self, reason: str) -> None:
        """End the stream from this side. Call on the event loop."""
        if not self.closed.is_set():
            self.reason = reason
            self.closed.set()


class FrontEnds:
    """All attached front ends; at most one stream per front end."""

    def __init__(self) -> None:
        self._slots = itertools.count()
        self._by_client: dict[int, FrontEnd] = {}
        self._by_id: dict[str, FrontEnd] = {}
        self._gone: list[Callable[[int], None]] = []
        # Why the worker is leaving, once it is; then no front end may attach.
        self._leaving = ""

    def __iter__(self) -> Iterator[FrontEnd]:
        return iter(list(self._by_client.values()))

    def __len__(self) -> int:
        return len(self._by_client)

    def on_gone(self, callback: Callable[[int], None]) -> None:
        """Call back with the slot of every front end whose stream has ended."""
        self._gone.append(callback)

    def attach(self, hello: worker_pb2.FrontendHello, down: Downstream) -> FrontEnd:
        """Attach a front end; disconnect an older stream of the same front end first.

        Raise AttachRefused if the worker is leaving, if another process of the same id is attached and alive
        (two that replace each other would both lose all their streams again and again), or if the hello is
        older than the attached stream.
        """
        if self._leaving:
            raise AttachRefused(self._leaving)
        older = self._by_id.get(hello.frontend_id)
        if older is not None:
            self._check_successor(older, hello)
            older.disconnect("attached anew")
            self.detach(older)
        front_end = FrontEnd(next(self._slots), hello, down)
        self._by_client[front_end.client] = self._by_id[front_end.frontend_id] = front_end
        log.info("front end %s attached (slot %d)", front_end.frontend_id, front_end.client)
        return front_end

    @staticmethod
    def _check_successor(older: FrontEnd, hello: worker_pb2.FrontendHello) -> None:
        if older.incarnation != hello.incarnation:
            if time.monotonic() - older.last_received_s < _ALIVE_S:
                raise AttachRefused(
                    f"another process attached as front end {hello.frontend_id} and is alive; give "
                    "each front end its own --id"
                )
        elif hello.attempt < older.attempt:
            raise AttachRefused("a later connection of this front end is attached")

    def detach(self, front_end: FrontEnd) -> None:
        """Remove a front end whose stream has ended, with everything it had here. Doing it twice is
        allowed."""
        if self._by_client.pop(front_end.client, None) is None:
            return
        if self._by_id.get(front_end.frontend_id) is front_end:
            del self._by_id[front_end.frontend_id]
        front_end.disconnect("the stream ended")
        log.info("front end %s detached: %s", front_end.frontend_id, front_end.reason)
        for callback in self._gone:
            callback(front_end.client)

    async def leave(self, goodbye: worker_pb2.Goodbye) -> None:
        """Say goodbye to all and end their streams; refuse later ones. Takes a second at most."""
        self.send_goodbye(goodbye)
        waiting = [asyncio.create_task(front_end.wait_closed()) for front_end in self]
        if waiting:
            # Let front ends close their ends, so that what was sent before is not lost.
            _, late = await asyncio.wait(waiting, timeout=_GOODBYE_S)
            for task in late:
                task.cancel()
        for front_end in self:
            front_end.disconnect(self._leaving)

    def send_goodbye(self, goodbye: worker_pb2.Goodbye) -> None:
        """Tell all front ends that this worker leaves; the first reason stays."""
        if self._leaving:
            return
        self._leaving = goodbye.reason or "the worker is leaving"
        for front_end in self:
            front_end.send(worker_pb2.AttachDown(goodbye=goodbye))

    def by_client(self, client: int) -> FrontEnd | None:
        """Return the front end in this slot while it is attached."""
        return self._by_client.get(client)

    def by_id(self, frontend_id: str) -> FrontEnd | None:
        """Return the front end with this id while it is attached."""
        return self._by_id.get(frontend_id)


HEARTBEAT_S: Final = 0.5
_Heartbeat = Callable[[str], worker_pb2.Heartbeat]


async def send_heartbeats(
    front_ends: FrontEnds, silence_s: float, heartbeats: Callable[[], _Heartbeat]
) -> None:
    """Send heartbeats until cancelled; disconnect front ends that are silent for `silence_s` seconds.

    `heartbeats()` looks at the engine once, and returns the heartbeat for each front end, by its id.
    """
    due_s = time.monotonic()
    while True:
        due_s += HEARTBEAT_S
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        now_s = time.monotonic()
        # While this process was suspended it could not receive anything.
        late_s = now_s - due_s
        due_s = now_s
        if not front_ends:
            continue
        heartbeat = heartbeats()
        for front_end in front_ends:
            front_end.check(now_s, late_s, silence_s)
            if front_end.has_read_all:
                front_end.send(worker_pb2.AttachDown(heartbeat=heartbeat(front_end.frontend_id)))
