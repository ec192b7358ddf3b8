"""Protobuf messages over one TCP connection, each behind its length, in the clear or inside TLS.

The data path's transport: one message an engine step and front end is a few hundred small messages a second,
and gRPC's Python binding takes several times the CPU of this for each (docs/decisions/0007).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, Generic, Protocol, Self, TypeVar, cast

from google.protobuf.message import DecodeError

from tailrace.security.refusals import refusal
from tailrace.security.roles import NoIdentity, Role
from tailrace.security.session import TlsSession
from tailrace.security.transport import PLAIN, Transport
from tailrace.service.channels import format_error
from tailrace.service.server import ListenError
from tailrace.service.socket_writer import SocketWriter
from tailrace.service.tasks import task_error

log = logging.getLogger(__name__)

DEFAULT_MAX_MESSAGE_BYTES: Final = 64 << 20
"""Largest message that an end takes unless told otherwise; each end announces its own in its hello."""
MIN_MESSAGE_BYTES: Final = 1 << 20
"""The least that an end may announce: requests and steps of usual size always fit."""

MAX_MESSAGE_BYTES: Final = 1 << 30
"""The most that an end may announce; a message is held in memory several times over."""

_LENGTH_BYTES: Final = 4
# What is read ahead of its reader; beyond it the sender has to wait.
_READ_AHEAD_BYTES: Final = 16 << 20
# What `write` lets wait for the peer before it waits itself.
_WRITE_AHEAD_BYTES: Final = 64 << 10
# A peer whose machine is gone answers nothing; the kernel finds out.
_PROBE_AFTER_S: Final = 10
_PROBE_EVERY_S: Final = 5
_PROBES: Final = 3
_UNACKNOWLEDGED_MS: Final = 60_000
# For a client to prove itself once it is connected.
_HANDSHAKE_S: Final = 5.0
# What a refused client has to read why.
_REFUSED_S: Final = 1.0


class StreamBroken(ConnectionError):
    """The stream ended, or what came over it is no message; the text says which."""


class StreamRefused(StreamBroken):
    """One end does not take the other's certificate, or does not speak TLS; the text says which."""


class Message(Protocol):
    """What protobuf's generated classes have."""

    def SerializeToString(self) -> bytes: ...

    @classmethod
    def FromString(cls, data: bytes, /) -> Self: ...


Received = TypeVar("Received", bound=Message)


class MessageStream(asyncio.Protocol, Generic[Received]):
    """One end. One task reads; any thread sends. A read or write may be cancelled."""

    def __init__(
        self,
        received: type[Received],
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        tls: TlsSession | None = None,
    ) -> None:
        """`received`: the class of the messages that come in. A larger one than `max_message_bytes`
        breaks the stream: who sends has to keep to what it was told. `tls` None: in the clear."""
        self._parse = received.FromString
        self._max_message_bytes = max_message_bytes
        # None: in the clear.
        self.tls = tls
        # Set once messages may be sent, or the stream is over.
        self._opened = asyncio.Event()
        # When bytes last came in, in seconds of the monotonic clock.
        self.received_s = time.monotonic()
        self._transport: asyncio.Transport | None = None
        # Set for as long as it is connected.
        self._writer: SocketWriter | None = None
        self._buffer = bytearray()
        self._messages: deque[tuple[Received, int]] = deque()
        self._unread_bytes = 0
        self._arrived = asyncio.Event()
        self._writable = asyncio.Event()
        self._reading = True
        # Set once the stream is over: why, and whether that was over somebody's certificate.
        self._end: str | None = None
        self._refused = False

    async def opened(self) -> None:
        """Until both ends have proved themselves, where they have to. Raises StreamBroken."""
        await self._opened.wait()
        if self._end is not None:
            raise self._broken(self._end or "the other end closed before it had proved itself")

    async def read(self) -> Received | None:
        """The next message; None: the other end closed. Raises StreamBroken."""
        while not self._messages:
            if self._end == "":
                return None
            if self._end is not None:
                raise self._broken(self._end)
            self._arrived.clear()
            await self._arrived.wait()
        message, size = self._messages.popleft()
        self._unread_bytes -= size
        if not self._reading and self._unread_bytes <= _READ_AHEAD_BYTES // 2 and self._transport is not None:
            self._reading = True
            self._transport.resume_reading()
        return message

    def send(self, message: Message) -> None:
        """Send; never waits. Any thread; who sends has to look at `unsent_bytes`. Raises StreamBroken."""
        writer = self._writer
        if self._end is not None or writer is None:
            raise StreamBroken(self._end or "closed")
        data = message.SerializeToString()
        framed = len(data).to_bytes(_LENGTH_BYTES, "little") + data
        try:
            if self.tls is None:
                writer.write(framed)
            else:
                self.tls.send(framed, writer.write)
        except OSError as error:
            # The transport finds out, too, and ends the reader.
            raise StreamBroken(str(error)) from error

    @property
    def unsent_bytes(self) -> int:
        """Bytes that wait for the other end to read."""
        return 0 if self._writer is None else self._writer.kept_bytes

    def stalled_s(self, now_s: float) -> float:
        """For how many seconds the other end has taken nothing of what waits for it; 0 while nothing
        waits."""
        return 0.0 if self._writer is None else self._writer.stalled_s(now_s)

    async def write(self, message: Message) -> None:
        """Send; waits while the other end does not keep up. Raises StreamBroken."""
        await self._writable.wait()
        self.send(message)
        if self.unsent_bytes > _WRITE_AHEAD_BYTES:
            self._writable.clear()

    def close(self) -> None:
        """End it from this side, now; what is not sent yet is lost."""
        self._finish("closed")
        if self._transport is not None:
            self._transport.abort()

    @property
    def closed(self) -> bool:
        """Whether it is over."""
        return self._end is not None

    # ---- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are of no class of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        made = self._transport.get_extra_info("socket")
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_AFTER_S)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_EVERY_S)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)
        # The transport reads and we write: each has a descriptor of its own.
        own = socket.socket(fileno=os.dup(made.fileno()))
        own.setblocking(False)
        # If writing fails the transport learns it, too: its reader is told.
        self._writer = SocketWriter(own, lambda error: self._writable.set())
        self._writable.set()
        if self.tls is None:
            self.on_open()
        else:
            self.tls.begin(self._write_tls)

    def on_open(self) -> None:
        """Both ends have proved themselves; called once."""
        self._opened.set()

    def data_received(self, data: bytes) -> None:
        self.received_s = time.monotonic()
        if self.tls is None:
            self._take(data)
        else:
            self._unseal(self.tls, data)

    def _unseal(self, tls: TlsSession, data: bytes) -> None:
        before = tls.established
        try:
            content, closed = tls.receive(data, self._write_tls)
        except ssl.SSLError as error:
            self._refused = self._end is None
            self._reject(refusal(error))
            return
        if tls.established and not before:
            self.on_open()
        if content and self._end is None:
            self._take(content)
        if closed:
            self.eof_received()

    def _write_tls(self, data: bytes) -> None:
        """What the protocol says by itself."""
        writer = self._writer
        if writer is None:
            return
        try:
            writer.write(data)
        except OSError as error:
            self._finish(str(error))

    def _take(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= _LENGTH_BYTES:
            begin = start + _LENGTH_BYTES
            size = int.from_bytes(buffer[start:begin], "little")
            if size > self._max_message_bytes:
                self._reject(
                    f"a message of {size} bytes was announced, more than {self._max_message_bytes}: the"
                    " peer speaks something else"
                )
                return
            if len(buffer) - begin < size:
                break
            try:
                message = self._parse(bytes(buffer[begin : begin + size]))
            except DecodeError as error:
                self._reject(f"not a message: {error}")
                return
            self._messages.append((message, size))
            self._unread_bytes += size
            start = begin + size
        del buffer[:start]
        if self._messages:
            self._arrived.set()
        if self._unread_bytes > _READ_AHEAD_BYTES and self._reading and self._transport is not None:
            self._reading = False
            self._transport.pause_reading()

    def eof_received(self) -> bool:
        self._finish("the other end stopped in the middle of a message" if self._buffer else "")
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._finish("closed" if error is None else format_error(error))

    def _broken(self, reason: str) -> StreamBroken:
        return StreamRefused(reason) if self._refused else StreamBroken(reason)

    def _reject(self, reason: str) -> None:
        self._finish(reason)
        if self._transport is not None:
            self._transport.abort()

    def _finish(self, reason: str) -> None:
        """Wake reader and writer. The first reason stands."""
        if self._end is None:
            self._end = reason
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self._arrived.set()
        self._writable.set()
        self._opened.set()


async def connect_stream(
    address: str,
    received: type[Received],
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    tls: TlsSession | None = None,
) -> MessageStream[Received]:
    """Connect to HOST:PORT, and wait until the other end has proved itself.

    That it takes our own certificate is not known before the first message from it. Raises OSError
    (StreamBroken), ValueError when this is no HOST:PORT.
    """
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    _, stream = await loop.create_connection(
        lambda: MessageStream(received, max_message_bytes, tls), host.strip("[]"), int(port)
    )
    try:
        await stream.opened()
    except BaseException:
        stream.close()
        raise
    return stream


@dataclass(frozen=True, slots=True)
class Admission:
    """Who may open a stream, and what others are told."""

    transport: Transport
    # In the clear anybody may.
    roles: frozenset[Role]
    # The message that says why somebody is refused.
    refusal: Callable[[str], Message]


ANYBODY: Final = Admission(PLAIN, frozenset(Role), cast(Callable[[str], Message], str))
"""For streams in the clear; nobody is refused."""


@asynccontextmanager
async def serve_streams(
    listen: str,
    received: type[Received],
    serve: Callable[[MessageStream[Received]], Awaitable[None]],
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    admission: Admission = ANYBODY,
) -> AsyncIterator[str]:
    """Serve each connection to HOST:PORT (port 0: any free one) until `serve` returns or the block ends.

    Yields HOST:PORT as listened on. At the end streams that are still served are closed. What `serve` raises
    is logged and ends its stream alone. Raises ListenError.
    """
    loop = asyncio.get_running_loop()
    host, _, port = listen.rpartition(":")
    serving: set[asyncio.Task[None]] = set()

    async def run(stream: MessageStream[Received], peer: str) -> None:
        try:
            if await _admitted(stream, admission, peer):
                await serve(stream)
        finally:
            stream.close()

    def done(task: asyncio.Task[None]) -> None:
        serving.discard(task)
        if (error := task_error(task)) is not None:
            log.error("a stream's server failed", exc_info=error)

    class Accepted(MessageStream[Received]):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            peer = str(transport.get_extra_info("peername"))
            task = loop.create_task(run(self, peer), name="stream")
            serving.add(task)
            task.add_done_callback(done)

    try:
        server = await loop.create_server(
            lambda: Accepted(received, max_message_bytes, admission.transport.accept()),
            host.strip("[]"),
            int(port),
        )
    except OSError as error:
        raise ListenError(f"cannot listen on {listen}: {error.strerror or error}") from error
    try:
        yield f"{host}:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)


async def _admitted(stream: MessageStream[Received], admission: Admission, peer: str) -> bool:
    """Whether the other end has proved that it may open a stream; else it is told why not."""
    if stream.tls is None:
        return True
    try:
        async with asyncio.timeout(_HANDSHAKE_S):
            await stream.opened()
    except TimeoutError:
        reason = f"it has not proved itself within {_HANDSHAKE_S:g} s"
    except StreamBroken as error:
        reason = str(error)
    else:
        reason = _unwelcome(stream.tls, admission.roles)
        if not reason:
            return True
        log.warning("refused a stream from %s: %s", peer, reason)
        with contextlib.suppress(TimeoutError, StreamBroken):
            stream.send(admission.refusal(reason))
            # It closes once it has read this.
            async with asyncio.timeout(_REFUSED_S):
                while await stream.read() is not None:
                    pass
        return False
    log.warning("refused a stream from %s: %s", peer, reason)
    return False


def _unwelcome(tls: TlsSession, roles: frozenset[Role]) -> str:
    """Why the other end may not open a stream here; empty: it may."""
    try:
        peer = tls.peer
    except NoIdentity as error:
        return str(error)
    if peer.role in roles:
        return ""
    needed = " or ".join(sorted(role.value for role in roles))
    return f"the certificate of {peer.name} is of role {peer.role.value}; this stream needs {needed}"
