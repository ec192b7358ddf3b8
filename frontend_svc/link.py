"""One stream to a worker: everything between this front end and it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from typing import Final, Protocol

from tailrace.records import InstanceRecord
from tailrace.service.message_stream import MessageStream, StreamBroken, connect_stream
from tailrace.service.said import said
from tailrace.v1 import worker_pb2

log = logging.getLogger(__name__)

AttachStream = MessageStream[worker_pb2.AttachDown]

HEARTBEAT_S: Final = 0.5
SILENCE_S: Final = 3.0
# Seconds for a worker to answer the hello.
_HELLO_S: Final = 5.0
_BACKOFF_S: Final = (0.1, 0.2, 0.5, 1.0, 2.0)
# Messages that may wait for a worker that does not read; one that reads takes each at once.
QUEUE_LIMIT: Final = 20_000

_HEARTBEAT: Final = worker_pb2.AttachUp(heartbeat=worker_pb2.Heartbeat())


class LinkSink(Protocol):
    """What a link reports; called on the event loop, must not block."""

    def on_attached(self, instance_id: str, hello: worker_pb2.WorkerHello) -> None:
        """The worker answers (for the first time, or again)."""

    def on_lost(self, instance_id: str, reason: str) -> None:
        """It answers no more; whatever it owned must go on elsewhere."""

    def on_message(self, instance_id: str, message: worker_pb2.AttachDown) -> None:
        """A message that is neither hello nor heartbeat."""


class _Protocol(Exception):
    """The worker does not read what it is sent, or does not speak as agreed."""


class Link:
    """Keeps one stream to one worker open for as long as `run` runs.

    A worker is lost when the stream breaks or when it is silent for SILENCE_S. Silence alone does not close
    the stream: a stopped process that wakes up finds in it the Abort of what it no longer owns.
    """

    def __init__(
        self,
        record: InstanceRecord,
        hello: worker_pb2.FrontendHello,
        sink: LinkSink,
    ) -> None:
        self.record = record
        self._hello = hello
        self._sink = sink
        self._queue: deque[worker_pb2.AttachUp] = deque()
        self._queued = asyncio.Event()
        self._overflown = asyncio.Event()
        self._attached = False
        self._heard_s = 0.0
        self._worker_hello: worker_pb2.WorkerHello | None = None
        # Cleared when the instance has left the fleet: a stream that breaks then is not opened again.
        self.wanted = True

    @property
    def instance_id(self) -> str:
        """The worker at the other end."""
        return self.record.instance_id

    @property
    def attached(self) -> bool:
        """Whether the worker answers now."""
        return self._attached

    def send(self, message: worker_pb2.AttachUp) -> bool:
        """Queue a message; False when the worker does not answer now, or does not read."""
        if not self._attached:
            return False
        return self._append(message)

    def queue_for_wakeup(self, message: worker_pb2.AttachUp) -> None:
        """Queue a message for a worker that is silent: it will read it if it ever wakes up."""
        self._append(message)

    def tick(self, now_s: float, late_s: float) -> None:
        """Called every HEARTBEAT_S: beat, and notice silence. `late_s`: how late this call itself is; for as
        long as this process did not run, nobody could be heard."""
        self._heard_s += late_s
        if not self._attached:
            return
        if now_s - self._heard_s > SILENCE_S:
            self._lose(f"silent for {now_s - self._heard_s:.1f} s")
        elif not self._queue:
            self.send(_HEARTBEAT)

    async def run(self) -> None:
        """Attach, and attach again whenever the stream breaks, until cancelled or no longer wanted."""
        failures = 0
        while self.wanted:
            opened_s = time.monotonic()
            reason = await self._attempt()
            self._lose(reason)
            if time.monotonic() - opened_s > SILENCE_S:
                failures = 0
            await asyncio.sleep(_BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)])
            failures += 1

    async def _attempt(self) -> str:
        """One stream from hello to its end; why it ended."""
        self._queue.clear()
        self._overflown.clear()
        try:
            async with asyncio.timeout(_HELLO_S):
                stream = await connect_stream(self.record.stream_address, worker_pb2.AttachDown)
        except TimeoutError:
            return f"no connection within {_HELLO_S:g} s"
        except (OSError, ValueError) as error:
            # ValueError: what etcd has is no HOST:PORT. One bad record must not end a front end.
            return said(error)
        try:
            async with asyncio.timeout(_HELLO_S):
                await stream.write(worker_pb2.AttachUp(hello=self._hello))
                first = await stream.read()
            if first is None:
                return "closed by the worker"
            if first.WhichOneof("body") != "hello":
                return "the first message was no hello"
            if first.hello.instance_id != self.instance_id:
                return f"the worker calls itself {first.hello.instance_id}"
            self._attach(first.hello)
            return await self._converse(stream)
        except TimeoutError:
            return f"no hello within {_HELLO_S:g} s"
        except StreamBroken as error:
            return said(error)
        finally:
            stream.close()

    async def _converse(self, stream: AttachStream) -> str:
        """Read and write until the stream ends; why it ended."""
        reason = ""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._read(stream))
                group.create_task(self._write(stream))
                group.create_task(self._break_on_overflow())
        except* (StreamBroken, _Protocol) as errors:
            reason = "; ".join(said(error) for error in errors.exceptions)
        # A task group of Python 3.11 forgets that it was cancelled when a task of its failed as well.
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError
        return reason

    def _attach(self, hello: worker_pb2.WorkerHello) -> None:
        self._worker_hello = hello
        self._heard_s = time.monotonic()
        self._attached = True
        log.info("attached to %s at %s", self.instance_id, self.record.stream_address)
        self._sink.on_attached(self.instance_id, hello)

    def _lose(self, reason: str) -> None:
        if self._attached:
            self._attached = False
            log.warning("lost %s: %s", self.instance_id, reason)
            self._sink.on_lost(self.instance_id, reason)

    async def _read(self, stream: AttachStream) -> None:
        while True:
            message = await stream.read()
            if message is None:
                raise _Protocol("closed by the worker")
            self._heard_s = time.monotonic()
            if not self._attached:
                assert self._worker_hello is not None
                log.info("%s answers again", self.instance_id)
                self._attached = True
                self._sink.on_attached(self.instance_id, self._worker_hello)
            if not message.HasField("heartbeat"):
                self._sink.on_message(self.instance_id, message)

    async def _write(self, stream: AttachStream) -> None:
        while True:
            await self._queued.wait()
            self._queued.clear()
            while self._queue:
                await stream.write(self._queue.popleft())

    async def _break_on_overflow(self) -> None:
        await self._overflown.wait()
        raise _Protocol(f"{QUEUE_LIMIT} messages unread")

    def _append(self, message: worker_pb2.AttachUp) -> bool:
        if len(self._queue) >= QUEUE_LIMIT:
            # Nothing may be left out: without its stream the worker aborts all that came over it.
            self._overflown.set()
            return False
        self._queue.append(message)
        self._queued.set()
        return True
