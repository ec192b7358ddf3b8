"""The links to workers: what is sent over them, each one's life, and which there are."""

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
from tailrace.service.reachability import Backoff
from tailrace.service.tasks import first_ended
from tailrace.v1 import worker_pb2

log = logging.getLogger(__name__)


# What a Submit takes beside its frames and its tokens, at most: ids and numbers.
_SUBMIT_OVERHEAD_BYTES: Final = 2048
# A token id as a varint.
_TOKEN_BYTES: Final = 5


class Outbox(Protocol):
    """Messages to attached workers."""

    def send(self, instance_id: str, message: worker_pb2.AttachUp) -> bool:
        """Queue a message; False when the instance is not attached, and the message is dropped."""

    def attached(self) -> list[str]:
        """Instances that answer now."""

    def max_message_bytes(self, instance_id: str) -> int:
        """Largest message that the instance takes; 0 when it is not attached."""


def abort(handles: list[int]) -> worker_pb2.AttachUp:
    """Free these requests."""
    return worker_pb2.AttachUp(abort=worker_pb2.Abort(handles=handles))


def submit_bytes(submit: worker_pb2.Submit) -> int:
    """An upper bound of the message's size, without encoding it."""
    return request_bytes(submit.frames, len(submit.output_token_ids))


def request_bytes(frames: Sequence[bytes], output_tokens: int) -> int:
    """An upper bound of the size of the Submit of such a request."""
    return sum(map(len, frames)) + _TOKEN_BYTES * output_tokens + _SUBMIT_OVERHEAD_BYTES


AttachStream = MessageStream[worker_pb2.AttachDown]

HEARTBEAT_S: Final = 0.5
# A worker from which nothing was heard for so long is lost; its stream stays open for GRACE_S more.
SILENCE_S: Final = 3.0
GRACE_S: Final = 2.0
# A worker that takes no byte of what waits for it for so long is cut off.
STALL_S: Final = 10.0
# Seconds for a worker to answer the hello.
HELLO_S: Final = 5.0
# A worker that lives is found again within a second.
_RETRY_FIRST_S: Final = 0.1
_RETRY_MOST_S: Final = 1.0
# Between two attempts at a worker that refuses this front end.
_REFUSED_S: Final = 2.0
# Messages that may wait for a worker that does not read; one that reads takes each at once. Submissions are
# turned away at half of it, so that there is room for aborts and answers.
QUEUE_LIMIT: Final = 20_000
# Bytes of submissions that may wait, in largest messages.
_QUEUED_SUBMITS: Final = 4

_HEARTBEAT: Final = worker_pb2.AttachUp(heartbeat=worker_pb2.Heartbeat())


class LossCause(enum.Enum):
    """How an instance was lost."""

    # It said goodbye: it was told to stop.
    STOPPED = "stopped"
    # It said that its engine failed, or its process is known to be gone.
    ENGINE_FAILED = "engine failed"
    # The stream broke. Whether the process or the network is at fault is known after the next attempt to
    # connect.
    BROKEN = "broken"
    # Nothing was heard for SILENCE_S.
    SILENT = "silent"


@dataclass(frozen=True, slots=True)
class Loss:
    """Why an instance does not answer any more."""

    cause: LossCause
    reason: str


class LinkSink(Protocol):
    """What a link reports; called on the event loop, must not block."""

    def on_attached(self, instance_id: str, hello: worker_pb2.WorkerHello) -> None:
        """The worker answers (for the first time, or again)."""

    def on_lost(self, instance_id: str, loss: Loss) -> None:
        """It answers no more; whatever it owned must go on elsewhere."""

    def on_process_gone(self, instance_id: str) -> None:
        """After on_lost: nothing listens at its address any more, so its process has ended."""

    def on_message(self, instance_id: str, message: worker_pb2.AttachDown) -> None:
        """A message that is neither hello nor heartbeat."""


class _Ended(Exception):
    """The conversation is over."""

    def __init__(self, reason: str, cause: LossCause = LossCause.BROKEN) -> None:
        super().__init__(reason)
        self.cause = cause


class _Refused(Exception):
    """The worker does not serve this front end."""


class Link:
    """Keeps one stream to one worker open for as long as `run` runs.

    A worker is lost when the stream breaks or when it is silent for SILENCE_S. Silence does not close the
    stream at once: a process that was stopped for a moment finds in it the Abort of what it no longer owns.
    After GRACE_S more the stream is closed and another one tried, for the connection itself may be dead.
    """

    def __init__(
        self,
        record: InstanceRecord,
        hello: worker_pb2.FrontendHello,
        sink: LinkSink,
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
        # Set when the conversation must end: why.
        self._broken = asyncio.Event()
        self._break_reason = ""
        self._stream: AttachStream | None = None
        self._attached = False
        # Seconds of the monotonic clock; moved on by as much as this process itself stood still.
        self._heard_s = 0.0
        self._worker_hello: worker_pb2.WorkerHello | None = None
        # Why the worker refuses us, as last logged.
        self._refusal = ""
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

    @property
    def max_message_bytes(self) -> int:
        """Largest message that the worker takes."""
        hello = self._worker_hello
        return hello.max_message_bytes or DEFAULT_MAX_MESSAGE_BYTES if hello else DEFAULT_MAX_MESSAGE_BYTES

    def send(self, message: worker_pb2.AttachUp) -> bool:
        """Queue a message; False when the worker does not answer now, or cannot be given more submissions."""
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
        """Queue a message for a worker that is silent: it will read it if it ever wakes up."""
        self._append(message)

    def tick(self, now_s: float, late_s: float) -> None:
        """Called every HEARTBEAT_S: beat, and notice silence. `late_s`: how late this call itself is; for as
        long as this process did not run, nobody could be heard."""
        self._heard_s += late_s
        stream = self._stream
        if stream is None:
            return
        # A large message is heard while it comes in, not only once it is whole.
        self._heard_s = max(self._heard_s, stream.received_s)
        silent_s = now_s - self._heard_s
        if self._attached and silent_s > SILENCE_S:
            self._lose(Loss(LossCause.SILENT, f"silent for {silent_s:.1f} s"))
        if silent_s > SILENCE_S + GRACE_S:
            self.cut(f"silent for {silent_s:.1f} s")
        elif stream.stalled_s(now_s) - late_s > STALL_S:
            self.cut(f"took nothing of {stream.unsent_bytes} bytes for {STALL_S:g} s")
        elif self._attached and not self._queue:
            self._append(_HEARTBEAT)

    def cut(self, reason: str) -> None:
        """End the stream, on which the worker aborts all that came over it, and open another one."""
        self._break_reason = reason
        self._broken.set()

    async def run(self) -> None:
        """Attach, and attach again whenever the stream breaks, until cancelled or no longer wanted."""
        while self.wanted:
            opened_s = time.monotonic()
            delay_s = 0.0
            try:
                await self._attempt()
            except _Refused as error:
                delay_s = _REFUSED_S
                self._log_refusal(str(error))
            except _Ended as error:
                self._lose(Loss(error.cause, str(error)))
            if time.monotonic() - opened_s > SILENCE_S:
                self._backoff.reset()
            await asyncio.sleep(delay_s + self._backoff.next_s())

    async def _attempt(self) -> None:
        """One stream from hello to its end. Raises _Ended, _Refused."""
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
            raise _Ended(f"no hello within {HELLO_S:g} s") from None
        except StreamRefused as error:
            raise _Refused(str(error)) from error
        except StreamBroken as error:
            raise _Ended(format_error(error)) from error
        finally:
            self._stream = None
            stream.close()

    async def _connect(self) -> AttachStream:
        """Connect. Raises _Ended, _Refused."""
        limit = self._hello.max_message_bytes or DEFAULT_MAX_MESSAGE_BYTES
        try:
            async with asyncio.timeout(HELLO_S):
                tls = self._transport.dial(Role.WORKER)
                return await connect_stream(self.record.stream_address, worker_pb2.AttachDown, limit, tls)
        except StreamRefused as error:
            raise _Refused(str(error)) from error
        except TimeoutError:
            raise _Ended(f"no connection within {HELLO_S:g} s") from None
        except ConnectionRefusedError as error:
            if self._worker_hello is not None:
                self._worker_hello = None
                self._sink.on_process_gone(self.instance_id)
            raise _Ended(format_error(error)) from error
        except (OSError, ValueError) as error:
            # ValueError: what etcd has is no HOST:PORT. One bad record must not end a front end.
            raise _Ended(format_error(error)) from error

    def _next_hello(self) -> worker_pb2.AttachUp:
        self._attempts += 1
        hello = worker_pb2.FrontendHello()
        hello.CopyFrom(self._hello)
        hello.attempt = self._attempts
        return worker_pb2.AttachUp(hello=hello)

    def _read_hello(self, first: worker_pb2.AttachDown | None) -> worker_pb2.WorkerHello:
        """Raises _Ended, _Refused."""
        if first is None:
            raise _Ended("closed by the worker")
        if first.HasField("refused"):
            raise _Refused(first.refused.reason)
        if not first.HasField("hello"):
            raise _Ended("the first message was no hello")
        if first.hello.instance_id != self.instance_id:
            raise _Ended(f"the worker calls itself {first.hello.instance_id}")
        identity = self.record.model_identity
        if identity is not None and first.hello.model != identity.key:
            raise _Ended("it runs another model than its record says: it was started anew")
        return first.hello

    def _attach(self, stream: AttachStream, hello: worker_pb2.WorkerHello) -> None:
        self._worker_hello = hello
        self._stream = stream
        self._heard_s = time.monotonic()
        self._attached = True
        self._refusal = ""
        log.info("attached to %s at %s", self.instance_id, self.record.stream_address)
        self._sink.on_attached(self.instance_id, hello)

    def _lose(self, loss: Loss) -> None:
        if self._attached:
            self._attached = False
            log.warning("lost %s: %s", self.instance_id, loss.reason)
            self._sink.on_lost(self.instance_id, loss)

    def _log_refusal(self, reason: str) -> None:
        """Once, not at every attempt."""
        if reason != self._refusal:
            self._refusal = reason
            log.error("no stream to %s: %s", self.instance_id, reason)

    async def _read(self, stream: AttachStream) -> None:
        while True:
            message = await stream.read()
            if message is None:
                raise _Ended("closed by the worker")
            self._heard_s = time.monotonic()
            if message.HasField("goodbye"):
                goodbye = message.goodbye
                cause = LossCause.ENGINE_FAILED if goodbye.engine_failed else LossCause.STOPPED
                raise _Ended(goodbye.reason or cause.value, cause)
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
                message = self._queue.popleft()
                if message.HasField("submit"):
                    self._queued_submit_bytes -= submit_bytes(message.submit)
                await stream.write(message)

    async def _wait_for_break(self) -> None:
        await self._broken.wait()
        raise _Ended(self._break_reason)

    def _append(self, message: worker_pb2.AttachUp) -> bool:
        if len(self._queue) >= QUEUE_LIMIT:
            # Nothing may be left out: without its stream the worker aborts all that came over it.
            self.cut(f"{QUEUE_LIMIT} messages unread")
            return False
        self._queue.append(message)
        self._queued.set()
        return True


@dataclass(slots=True)
class _Kept:
    link: Link
    task: asyncio.Task[None]


class Workers:
    """One Link a member instance. Is the Outbox of everything else."""

    def __init__(
        self,
        instances: Callable[[], Mapping[str, InstanceRecord]],
        hello: worker_pb2.FrontendHello,
        sink: LinkSink,
        transport: Transport = PLAIN,
    ) -> None:
        """`instances` gives the fleet's members whenever asked."""
        self._instances = instances
        self._hello = hello
        self._sink = sink
        self._transport = transport
        self._kept: dict[str, _Kept] = {}
        self._group: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Keep the links until cancelled; then break all streams, and the workers free what they carried.

        Whatever a link or its sink raises unexpectedly comes out of here.
        """
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                group.create_task(self._tick(), name="heartbeats")
                self.refresh()
        finally:
            self._group = None
            self._kept.clear()

    def refresh(self) -> None:
        """Membership has changed: attach to who is new, attach anew to who was restarted."""
        if self._group is None:
            return
        members = self._instances()
        for instance_id, kept in list(self._kept.items()):
            record = members.get(instance_id)
            if record is None:
                # It may still carry streams of ours; when its stream breaks, that is the end of it.
                kept.link.wanted = False
                if not kept.link.attached:
                    self._drop(instance_id)
            elif record.incarnation != kept.link.record.incarnation:
                self._drop(instance_id)
                self._sink.on_process_gone(instance_id)
            else:
                kept.link.wanted = True
                if kept.task.done():
                    self._drop(instance_id)
        for instance_id, record in members.items():
            if instance_id not in self._kept:
                self._keep(record)

    def send(self, instance_id: str, message: worker_pb2.AttachUp) -> bool:
        """See Outbox."""
        kept = self._kept.get(instance_id)
        return kept is not None and kept.link.send(message)

    def send_on_wakeup(self, instance_id: str, message: worker_pb2.AttachUp) -> None:
        """Leave a message for an instance that was just lost; it reads it if it was only stopped."""
        kept = self._kept.get(instance_id)
        if kept is not None:
            kept.link.queue_for_wakeup(message)

    def cut(self, instance_id: str, reason: str) -> None:
        """Break the stream to an instance that does not keep to the protocol; it is opened again."""
        kept = self._kept.get(instance_id)
        if kept is not None:
            kept.link.cut(reason)

    def attached(self) -> list[str]:
        """See Outbox."""
        return [instance_id for instance_id, kept in self._kept.items() if kept.link.attached]

    def max_message_bytes(self, instance_id: str) -> int:
        """See Outbox."""
        kept = self._kept.get(instance_id)
        return kept.link.max_message_bytes if kept is not None and kept.link.attached else 0

    def _keep(self, record: InstanceRecord) -> None:
        assert self._group is not None
        link = Link(record, self._hello, self._sink, self._transport)
        task = self._group.create_task(link.run(), name=f"link to {record.instance_id}")
        self._kept[record.instance_id] = _Kept(link, task)

    def _drop(self, instance_id: str) -> None:
        kept = self._kept.pop(instance_id)
        kept.task.cancel()
        if kept.link.attached:
            log.warning("lost %s: it was restarted", instance_id)
            self._sink.on_lost(instance_id, Loss(LossCause.BROKEN, "restarted"))

    async def _tick(self) -> None:
        due_s = time.monotonic() + HEARTBEAT_S
        while True:
            await asyncio.sleep(due_s - time.monotonic())
            now_s = time.monotonic()
            late_s = now_s - due_s
            for kept in list(self._kept.values()):
                kept.link.tick(now_s, late_s)
            due_s = now_s + HEARTBEAT_S
