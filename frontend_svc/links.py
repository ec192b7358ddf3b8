"""The links to workers: the messages, the life of one link, and the set of links.

A front end keeps one message stream open to each instance (`Link`), over which it submits and aborts requests
and receives outputs. `WorkerLinks` opens and closes them as membership changes.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from tailrace.records import InstanceRecord
from tailrace.security.roles import Role
from tailrace.security.transport import PLAIN, Transport
from tailrace.service.channels import format_error
from tailrace.service.message_stream import (
    DEFAULT_MAX_MESSAGE_BYTES,
    MessageStream,
    StreamBroken,
    StreamRefused,
    connect_stream,
)
from tailrace.service.tasks import Backoff, cancel, first_ended, supervise
from tailrace.telemetry.incidents import guarded, unreadable
from tailrace.v1 import worker_pb2

log = logging.getLogger(__name__)


# Upper bound of a Submit without its frames and tokens: ids and numbers.
_SUBMIT_OVERHEAD_BYTES: Final = 2048
# Largest size of a token id as a varint.
_TOKEN_BYTES: Final = 5


class Outbox(Protocol):
    """Send messages to attached workers."""

    def send(self, instance_id: str, message: worker_pb2.AttachUp) -> bool:
        """Queue a message; return False and drop it if the instance is not attached."""

    def attached(self) -> list[str]:
        """Return the instances that answer now."""

    def max_message_bytes(self, instance_id: str) -> int:
        """Return the largest message that the instance accepts; 0 if it is not attached."""


def abort_message(handles: list[int]) -> worker_pb2.AttachUp:
    """Build a message that frees these requests."""
    return worker_pb2.AttachUp(abort=worker_pb2.Abort(handles=handles))


def submit_bytes(submit: worker_pb2.Submit) -> int:
    """Return an upper bound of the message's size in bytes without encoding it."""
    return request_bytes(submit.frames, len(submit.output_token_ids))


def request_bytes(frames: Sequence[bytes], output_tokens: int) -> int:
    """Return an upper bound, in bytes, of the Submit of a request with these frames and output tokens."""
    return sum(map(len, frames)) + _TOKEN_BYTES * output_tokens + _SUBMIT_OVERHEAD_BYTES


AttachStream = MessageStream[worker_pb2.AttachDown]

HEARTBEAT_S: Final = 0.5
# A worker that sends nothing for SILENCE_S is lost; its stream stays open for GRACE_S more.
SILENCE_S: Final = 3.0
GRACE_S: Final = 2.0
# A worker that reads none of the bytes that wait for it for this long is disconnected.
STALL_S: Final = 10.0
# Seconds for a worker to answer the hello.
HELLO_S: Final = 5.0
# Short enough that a worker that is alive is reconnected within a second.
_RETRY_FIRST_S: Final = 0.1
_RETRY_MOST_S: Final = 1.0
# Pause between attempts at a worker that refuses this front end.
_REFUSED_S: Final = 2.0
# Messages that may be queued for a worker that does not read. Submissions are refused at half of it, which
# leaves room for aborts and replies.
QUEUE_LIMIT: Final = 20_000
# Bound of the queued submissions' bytes, in units of the largest message.
_QUEUED_SUBMITS: Final = 4

_HEARTBEAT: Final = worker_pb2.AttachUp(heartbeat=worker_pb2.Heartbeat())


class LossCause(enum.Enum):
    """How an instance was lost."""

    # It sent a goodbye because it was told to stop.
    STOPPED = "stopped"
    # It reported that its engine failed, or its process is known to be gone.
    ENGINE_FAILED = "engine failed"
    # The stream broke. The next attempt to connect shows whether the process or the network is at fault.
    BROKEN = "broken"
    # Nothing was received for SILENCE_S.
    SILENT = "silent"


@dataclass(frozen=True, slots=True)
class Loss:
    """Why an instance stopped answering."""

    cause: LossCause
    reason: str


class LinkEvents(Protocol):
    """Receive what a link reports. Called on the event loop; must not block."""

    def on_attached(self, instance_id: str, hello: worker_pb2.WorkerHello) -> None:
        """Handle a worker that answers, for the first time or again."""

    def on_lost(self, instance_id: str, loss: Loss) -> None:
        """Handle a worker that stopped answering; whatever it owned must continue elsewhere."""

    def on_process_gone(self, instance_id: str) -> None:
        """Handle the end of a lost worker's process: after on_lost, nothing listens at its address any
        more."""

    def on_silence_explained(self, instance_id: str) -> None:
        """Handle a goodbye of a worker that was lost for its silence."""

    def on_message(self, instance_id: str, message: worker_pb2.AttachDown) -> None:
        """Handle a message that is not the hello."""


class _LinkEnded(Exception):
    """The stream to the worker is over."""

    def __init__(self, reason: str, cause: LossCause = LossCause.BROKEN) -> None:
        super().__init__(reason)
        self.cause = cause


class _LinkRefused(Exception):
    """The worker does not accept this front end."""


class Link:
    """Keep one stream to one worker open while `run` runs.

    A worker is lost when the stream breaks or when it is silent for SILENCE_S. Silence does not close the
    stream at once: a process that was suspended for a moment still reads the aborts of what it no longer
    owns. After GRACE_S more the stream is closed and a new one tried, because the connection itself may be
    dead.
    """

    def __init__(
        self,
        record: InstanceRecord,
        hello: worker_pb2.FrontendHello,
        sink: LinkEvents,
        transport: Transport = PLAIN,
    ) -> None:
        self.record = record
        self._hello = hello
        self._sink = sink
        self._transport = transport
        self._attempts = 0
        self._backoff = Backoff(_RETRY_FIRST_S, _RETRY_MOST_S)
        self._queue: deque[worker_pb2.AttachUp] = deque()
        self._queued = asyncio.Event()
        self._queued_submit_bytes = 0
        # Set to end the current stream; the reason is in `_break_reason`.
        self._broken = asyncio.Event()
        self._break_reason = ""
        self._stream: AttachStream | None = None
        self._attached = False
        # Seconds of the monotonic clock, shifted by the time for which this process itself was suspended.
        self._last_received_s = 0.0
        self._worker_hello: worker_pb2.WorkerHello | None = None
        # The worker's last logged reason to refuse this front end.
        self._refusal = ""
        # False once the instance has left the fleet: a stream that breaks then is not reopened.
        self.wanted = True

    @property
    def instance_id(self) -> str:
        """Return the id of the worker at the other end."""
        return self.record.instance_id

    @property
    def attached(self) -> bool:
        """Return whether the worker answers now."""
        return self._attached

    @property
    def max_message_bytes(self) -> int:
        """Return the largest message that the worker accepts, in bytes."""
        hello = self._worker_hello
        return hello.max_message_bytes or DEFAULT_MAX_MESSAGE_BYTES if hello else DEFAULT_MAX_MESSAGE_BYTES

    def send(self, message: worker_pb2.AttachUp) -> bool:
        """Queue a message; return False if the worker is not attached or its queue of submissions is full."""
        if not self._attached:
            return False
        if message.HasField("submit"):
            size = submit_bytes(message.submit)
            waits = self._queued_submit_bytes
            if size > self.max_message_bytes or len(self._queue) >= QUEUE_LIMIT // 2:
                return False
            if waits and waits + size > _QUEUED_SUBMITS * self.max_message_bytes:
                return False
            self._queued_submit_bytes += size
        return self._append(message)

    def queue_for_wakeup(self, message: worker_pb2.AttachUp) -> None:
        """Queue a message for a silent worker, which reads it if it resumes."""
        self._append(message)

    def tick(self, now_s: float, late_s: float) -> None:
        """Send a heartbeat and detect silence. Called every HEARTBEAT_S.

        `late_s`: by how many seconds this call is late; while this process did not run, it could not receive
        anything.
        """
        self._last_received_s += late_s
        stream = self._stream
        if stream is None:
            return
        # Bytes of a large message count when they arrive, not only once the message is complete.
        self._last_received_s = max(self._last_received_s, stream.received_s)
        silent_s = now_s - self._last_received_s
        if self._attached and silent_s > SILENCE_S:
            self._mark_lost(Loss(LossCause.SILENT, f"silent for {silent_s:.1f} s"))
        if silent_s > SILENCE_S + GRACE_S:
            self.reconnect(f"silent for {silent_s:.1f} s")
        elif stream.stalled_s(now_s) - late_s > STALL_S:
            self.reconnect(f"took nothing of {stream.unsent_bytes} bytes for {STALL_S:g} s")
        elif self._attached and not self._queue:
            self._append(_HEARTBEAT)

    def reconnect(self, reason: str) -> None:
        """End the stream and open a new one; the worker then aborts everything that came over the old one."""
        self._break_reason = reason
        self._broken.set()

    async def run(self) -> None:
        """Attach, and again whenever the stream breaks, until cancelled or no longer wanted."""
        while self.wanted:
            opened_s = time.monotonic()
            delay_s = 0.0
            try:
                await self._attempt()
            except _LinkRefused as error:
                delay_s = _REFUSED_S
                self._log_refusal(str(error))
            except _LinkEnded as error:
                self._mark_lost(Loss(error.cause, str(error)))
            except Exception as error:
                # Its streams must go on elsewhere before this is started again.
                self._mark_lost(Loss(LossCause.BROKEN, f"the link failed: {error}"))
                raise
            if time.monotonic() - opened_s > SILENCE_S:
                self._backoff.reset()
            await asyncio.sleep(delay_s + self._backoff.next_s())

    async def _attempt(self) -> None:
        """Run one stream from hello to its end. Raise _LinkEnded or _LinkRefused."""
        self._queue.clear()
        self._queued_submit_bytes = 0
        self._broken.clear()
        stream = await self._connect()
        try:
            async with asyncio.timeout(HELLO_S):
                await stream.write(self._next_hello())
                first = await stream.read()
            self._attach(stream, self._read_hello(first))
            await first_ended(self._read(stream), self._write(stream), self._wait_for_break())
        except TimeoutError:
            raise _LinkEnded(f"no hello within {HELLO_S:g} s") from None
        except StreamRefused as error:
            raise _LinkRefused(str(error)) from error
        except StreamBroken as error:
            raise _LinkEnded(format_error(error)) from error
        finally:
            self._stream = None
            stream.close()

    async def _connect(self) -> AttachStream:
        """Connect to the worker. Raise _LinkEnded or _LinkRefused."""
        limit = self._hello.max_message_bytes or DEFAULT_MAX_MESSAGE_BYTES
        try:
            async with asyncio.timeout(HELLO_S):
                tls = self._transport.dial(Role.WORKER)
                return await connect_stream(self.record.stream_address, worker_pb2.AttachDown, limit, tls)
        except StreamRefused as error:
            raise _LinkRefused(str(error)) from error
        except TimeoutError:
            raise _LinkEnded(f"no connection within {HELLO_S:g} s") from None
        except ConnectionRefusedError as error:
            if self._worker_hello is not None:
                self._worker_hello = None
                self._sink.on_process_gone(self.instance_id)
            raise _LinkEnded(format_error(error)) from error
        except (OSError, ValueError) as error:
            # ValueError: the address in etcd is not HOST:PORT. One bad record must not end a front end.
            raise _LinkEnded(format_error(error)) from error

    def _next_hello(self) -> worker_pb2.AttachUp:
        self._attempts += 1
        hello = worker_pb2.FrontendHello()
        hello.CopyFrom(self._hello)
        hello.attempt = self._attempts
        return worker_pb2.AttachUp(hello=hello)

    def _read_hello(self, first: worker_pb2.AttachDown | None) -> worker_pb2.WorkerHello:
        """Check the worker's first message and return its hello. Raise _LinkEnded or _LinkRefused."""
        if first is None:
            raise _LinkEnded("closed by the worker")
        if first.HasField("refused"):
            raise _LinkRefused(first.refused.reason)
        if not first.HasField("hello"):
            raise _LinkEnded("the first message was not a hello")
        if first.hello.instance_id != self.instance_id:
            raise _LinkEnded(f"the worker calls itself {first.hello.instance_id}")
        if first.hello.model != self.record.model_identity.key:
            raise _LinkEnded("it runs another model than its record says: it was restarted")
        return first.hello

    def _attach(self, stream: AttachStream, hello: worker_pb2.WorkerHello) -> None:
        self._worker_hello = hello
        self._stream = stream
        self._last_received_s = time.monotonic()
        self._attached = True
        self._refusal = ""
        log.info("attached to %s at %s", self.instance_id, self.record.stream_address)
        self._sink.on_attached(self.instance_id, hello)

    def _mark_lost(self, loss: Loss) -> None:
        if self._attached:
            self._attached = False
            log.warning("lost %s: %s", self.instance_id, loss.reason)
            self._sink.on_lost(self.instance_id, loss)

    def _log_refusal(self, reason: str) -> None:
        """Log the reason once, not at every attempt."""
        if reason != self._refusal:
            self._refusal = reason
            log.error("no stream to %s: %s", self.instance_id, reason)

    async def _read(self, stream: AttachStream) -> None:
        await stream.deliver(self._handle)
        raise _LinkEnded("closed by the worker")

    def _handle(self, message: worker_pb2.AttachDown) -> None:
        """Handle one message. Raise _LinkEnded if it is a goodbye."""
        self._last_received_s = time.monotonic()
        if message.HasField("goodbye"):
            goodbye = message.goodbye
            cause = LossCause.ENGINE_FAILED if goodbye.engine_failed else LossCause.STOPPED
            if cause is LossCause.STOPPED and not self._attached:
                self._sink.on_silence_explained(self.instance_id)
            raise _LinkEnded(goodbye.reason or cause.value, cause)
        if not self._attached:
            assert self._worker_hello is not None
            log.info("%s answers again", self.instance_id)
            self._attached = True
            self._sink.on_attached(self.instance_id, self._worker_hello)
        try:
            self._sink.on_message(self.instance_id, message)
        except Exception as error:
            # It is unknown how much of the message was carried out: begin anew on another stream.
            unreadable("message of a worker", self.instance_id, error)
            raise _LinkEnded(f"a message cannot be processed: {error}") from error

    async def _write(self, stream: AttachStream) -> None:
        while True:
            await self._queued.wait()
            self._queued.clear()
            while self._queue:
                message = self._queue.popleft()
                if message.HasField("submit"):
                    self._queued_submit_bytes -= submit_bytes(message.submit)
                await stream.write(message)

    async def _wait_for_break(self) -> None:
        await self._broken.wait()
        raise _LinkEnded(self._break_reason)

    def _append(self, message: worker_pb2.AttachUp) -> bool:
        if len(self._queue) >= QUEUE_LIMIT:
            # No message may be skipped; closing the stream makes the worker abort everything that came over
            # it.
            self.reconnect(f"{QUEUE_LIMIT} messages unread")
            return False
        self._queue.append(message)
        self._queued.set()
        return True


@dataclass(slots=True)
class _LinkTask:
    link: Link
    task: asyncio.Task[None]


class WorkerLinks:
    """Keep one Link per member instance; the Outbox of everything else."""

    def __init__(
        self,
        instances: Callable[[], Mapping[str, InstanceRecord]],
        hello: worker_pb2.FrontendHello,
        sink: LinkEvents,
        transport: Transport = PLAIN,
    ) -> None:
        """Open nothing yet. `instances()` returns the current member instances by id."""
        self._instances = instances
        self._hello = hello
        self._sink = sink
        self._transport = transport
        self._links: dict[str, _LinkTask] = {}
        # Tasks of dropped links that have not ended yet.
        self._ending: set[asyncio.Task[None]] = set()
        self._running = False

    async def run(self) -> None:
        """Keep the links until cancelled, then close all streams; workers then free its requests."""
        self._running = True
        heartbeats = supervise("heartbeats", self._tick)
        try:
            with guarded("worker link"):
                self.refresh()
            await asyncio.get_running_loop().create_future()
        finally:
            self._running = False
            await cancel(heartbeats, *(entry.task for entry in self._links.values()), *self._ending)
            self._links.clear()

    def refresh(self) -> None:
        """Follow a membership change: attach to new instances and to restarted ones."""
        if not self._running:
            return
        members = self._instances()
        for instance_id, entry in list(self._links.items()):
            record = members.get(instance_id)
            if record is None:
                # It may still run streams of this front end; the link ends when its stream breaks.
                entry.link.wanted = False
                if not entry.link.attached:
                    self._drop(instance_id)
            elif record.incarnation != entry.link.record.incarnation:
                self._drop(instance_id)
                self._sink.on_process_gone(instance_id)
            else:
                entry.link.wanted = True
                if entry.task.done():
                    self._drop(instance_id)
        for instance_id, record in members.items():
            if instance_id not in self._links:
                self._keep(record)

    def send(self, instance_id: str, message: worker_pb2.AttachUp) -> bool:
        entry = self._links.get(instance_id)
        return entry is not None and entry.link.send(message)

    def send_on_wakeup(self, instance_id: str, message: worker_pb2.AttachUp) -> None:
        """Leave a message for an instance that was just lost; it reads it if it was only suspended."""
        entry = self._links.get(instance_id)
        if entry is not None:
            entry.link.queue_for_wakeup(message)

    def reconnect(self, instance_id: str, reason: str) -> None:
        """Break the stream to an instance that violates the protocol; it is opened again."""
        entry = self._links.get(instance_id)
        if entry is not None:
            entry.link.reconnect(reason)

    def attached(self) -> list[str]:
        return [instance_id for instance_id, entry in self._links.items() if entry.link.attached]

    def max_message_bytes(self, instance_id: str) -> int:
        entry = self._links.get(instance_id)
        return entry.link.max_message_bytes if entry is not None and entry.link.attached else 0

    def _keep(self, record: InstanceRecord) -> None:
        link = Link(record, self._hello, self._sink, self._transport)
        task = supervise("worker link", link.run, record.instance_id)
        self._links[record.instance_id] = _LinkTask(link, task)

    def _drop(self, instance_id: str) -> None:
        entry = self._links.pop(instance_id)
        entry.task.cancel()
        self._ending.add(entry.task)
        entry.task.add_done_callback(self._ending.discard)
        if entry.link.attached:
            log.warning("lost %s: it was restarted", instance_id)
            self._sink.on_lost(instance_id, Loss(LossCause.BROKEN, "restarted"))

    async def _tick(self) -> None:
        due_s = time.monotonic() + HEARTBEAT_S
        while True:
            await asyncio.sleep(due_s - time.monotonic())
            now_s = time.monotonic()
            late_s = now_s - due_s
            for entry in list(self._links.values()):
                entry.link.tick(now_s, late_s)
            due_s = now_s + HEARTBEAT_S
