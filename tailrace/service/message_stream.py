"""Length-prefixed protobuf messages over one TCP connection, unencrypted or inside TLS.

The data path's transport: one message per engine step and front end is a few hundred small messages per
second, and gRPC's Python binding uses several times the CPU for each (docs/decisions/0007).
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
from functools import partial
from typing import Final, Generic, TypeVar, cast

from google.protobuf.message import DecodeError, Message

from tailrace.security.refusals import refusal
from tailrace.security.roles import NoIdentity, Role
from tailrace.security.session import TlsSession
from tailrace.security.transport import Transport
from tailrace.service.channels import format_error
from tailrace.service.sockets import (
    ListenError,
    SocketWriter,
    bound_retransmission,
    listen_reason,
    probe_when_idle,
)
from tailrace.service.tasks import cancel, run_once
from tailrace.telemetry.incidents import loop_named, unreadable

log = logging.getLogger(__name__)

_LOOP: Final = loop_named("streams")
DEFAULT_MAX_MESSAGE_BYTES: Final = 64 << 20
"""Default of the largest message that an end accepts; each end announces its own in its hello."""
MIN_MESSAGE_BYTES: Final = 1 << 20
"""Smallest limit that an end may announce: requests and steps of usual size always fit."""

MAX_MESSAGE_BYTES: Final = 1 << 30
"""Largest limit that an end may announce; a message is held in memory several times over."""

_LENGTH_BYTES: Final = 4
# Bytes received ahead of the reader; beyond it the sender has to wait.
_READ_AHEAD_BYTES: Final = 16 << 20
# Unsent bytes beyond which `write` waits.
_WRITE_AHEAD_BYTES: Final = 64 << 10
# TCP keepalive, to detect a peer whose machine is gone.
_PROBE_AFTER_S: Final = 10
_PROBE_EVERY_S: Final = 5
_PROBES: Final = 3
# Bound of the retransmission interval, so that a link continues within a second of a short network outage.
_RETRANSMIT_S: Final = 1.0
_GIVE_UP_S: Final = 60.0
# Time for a client to complete the TLS handshake.
_HANDSHAKE_S: Final = 5.0
# Time for a refused client to read the reason.
_REFUSED_S: Final = 1.0


class StreamBroken(ConnectionError):
    """The stream ended, or received bytes that are not a message; the text says which."""


class StreamRefused(StreamBroken):
    """One end rejects the other's certificate, or does not speak TLS; the text says which."""


Received = TypeVar("Received", bound=Message)


class MessageStream(asyncio.Protocol, Generic[Received]):
    """One end of a stream. One task reads or delivers; any thread sends. All of these may be cancelled."""

    def __init__(
        self,
        received: type[Received],
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        tls: TlsSession | None = None,
    ) -> None:
        """`received`: class of the incoming messages.

        A message larger than `max_message_bytes` breaks the stream: the sender has to respect the announced
        limit. `tls` None: unencrypted.
        """
        self._parse = received.FromString
        self._max_message_bytes = max_message_bytes
        # None: unencrypted.
        self.tls = tls
        # Set once messages may be sent, or the stream has ended.
        self._opened = asyncio.Event()
        # When bytes last arrived, in seconds of the monotonic clock.
        self.received_s = time.monotonic()
        self._transport: asyncio.Transport | None = None
        # Set while connected.
        self._writer: SocketWriter | None = None
        self._buffer = bytearray()
        self._messages: deque[tuple[Received, int]] = deque()
        self._unread_bytes = 0
        # While `deliver` runs: the callback, and the exception with which it ended the stream.
        self._handle: Callable[[Received], None] | None = None
        self._handle_error: Exception | None = None
        self._arrived = asyncio.Event()
        self._writable = asyncio.Event()
        self._reading = True
        # Set when the stream ends: the reason ("" if the peer closed it), and whether a certificate was the
        # reason.
        self._end_reason: str | None = None
        self._refused = False

    async def opened(self) -> None:
        """Wait until TLS is established, if used. Raise StreamBroken."""
        await self._opened.wait()
        if self._end_reason is not None:
            raise self._broken(self._end_reason or "the other end closed during the handshake")

    async def read(self) -> Received | None:
        """Return the next message, or None if the other end closed. Raise StreamBroken."""
        while not self._messages:
            if self._end_reason == "":
                return None
            if self._end_reason is not None:
                raise self._broken(self._end_reason)
            self._arrived.clear()
            await self._arrived.wait()
        message, size = self._messages.popleft()
        self._unread_bytes -= size
        if not self._reading and self._unread_bytes <= _READ_AHEAD_BYTES // 2 and self._transport is not None:
            self._reading = True
            self._transport.resume_reading()
        return message

    async def deliver(self, handle: Callable[[Received], None]) -> None:
        """Call `handle` with each message as it arrives, until the other end closes. Raise StreamBroken.

        `handle` must not block. An exception of it ends the stream and is raised here. Messages arrive
        without a task being woken for each, which costs more than most of them.
        """
        self._handle = handle
        try:
            # Those that arrived before; later ones do not pass through here.
            while self._handle_error is None and (message := await self.read()) is not None:
                self._call(handle, message)
        except StreamBroken:
            if self._handle_error is None:
                raise
        finally:
            self._handle = None
            # Not kept: it has this stream in its frames.
            error, self._handle_error = self._handle_error, None
        if error is not None:
            try:
                raise error
            finally:
                del error

    def _call(self, handle: Callable[[Received], None], message: Received) -> None:
        try:
            handle(message)
        except Exception as error:  # noqa: BLE001 - `deliver` raises it
            self._handle_error = error
            self._finish("")

    def send(self, message: Message) -> None:
        """Send without waiting, from any thread; callers have to watch `unsent_bytes`. Raise StreamBroken."""
        writer = self._writer
        if self._end_reason is not None or writer is None:
            raise StreamBroken(self._end_reason or "closed")
        data = message.SerializeToString()
        framed = len(data).to_bytes(_LENGTH_BYTES, "little") + data
        try:
            if self.tls is None:
                writer.write(framed)
            else:
                self.tls.send(framed, writer.write)
        except OSError as error:
            # The transport notices as well and ends the reader.
            raise StreamBroken(str(error)) from error

    @property
    def unsent_bytes(self) -> int:
        """Return the bytes that the other end has not accepted yet."""
        return 0 if self._writer is None else self._writer.buffered_bytes

    def stalled_s(self, now_s: float) -> float:
        """Return for how many seconds the other end has accepted none of the unsent bytes; 0 if there are
        none."""
        return 0.0 if self._writer is None else self._writer.stalled_s(now_s)

    async def write(self, message: Message) -> None:
        """Send; wait while the other end does not keep up. Raise StreamBroken."""
        await self._writable.wait()
        self.send(message)
        if self.unsent_bytes > _WRITE_AHEAD_BYTES:
            self._writable.clear()

    def close(self) -> None:
        """Close at once; unsent bytes are lost."""
        self._finish("closed")
        if self._transport is not None:
            self._transport.abort()

    @property
    def closed(self) -> bool:
        """Return whether the stream has ended."""
        return self._end_reason is not None

    # ---- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not derive from asyncio's classes.
        self._transport = cast(asyncio.Transport, transport)
        transport_socket = self._transport.get_extra_info("socket")
        transport_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        probe_when_idle(transport_socket, _PROBE_AFTER_S, _PROBE_EVERY_S, _PROBES)
        bound_retransmission(transport_socket, _RETRANSMIT_S, _GIVE_UP_S)
        # The transport reads and the writer writes: each has a descriptor of its own.
        duplicate = socket.socket(fileno=os.dup(transport_socket.fileno()))
        duplicate.setblocking(False)
        # If writing fails, the transport notices as well and ends the reader.
        self._writer = SocketWriter(duplicate, lambda error: self._writable.set())
        self._writable.set()
        if self.tls is None:
            self.on_open()
        else:
            self.tls.begin(self._write_tls)

    def on_open(self) -> None:
        """Handle the end of the handshake; called once."""
        self._opened.set()

    def data_received(self, data: bytes) -> None:
        self.received_s = time.monotonic()
        if self.tls is None:
            self._parse_buffer(data)
        else:
            self._unseal(self.tls, data)

    def _unseal(self, tls: TlsSession, data: bytes) -> None:
        before = tls.established
        try:
            content, closed = tls.receive(data, self._write_tls)
        except ssl.SSLError as error:
            self._refused = self._end_reason is None
            self._reject(refusal(error))
            return
        if tls.established and not before:
            self.on_open()
        if content and self._end_reason is None:
            self._parse_buffer(content)
        if closed:
            self.eof_received()

    def _write_tls(self, data: bytes) -> None:
        """Send bytes of the TLS protocol itself."""
        writer = self._writer
        if writer is None:
            return
        try:
            writer.write(data)
        except OSError as error:
            self._finish(str(error))

    def _parse_buffer(self, data: bytes) -> None:
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
                # What it said is lost, so both ends begin anew on another stream.
                unreadable("message of a stream", self._peer(), error)
                self._reject(f"not a message: {error}")
                return
            start = begin + size
            if self._handle is None or self._messages:
                self._messages.append((message, size))
                self._unread_bytes += size
                continue
            self._call(self._handle, message)
            if self._handle_error is not None:
                return
        del buffer[:start]
        if self._messages:
            self._arrived.set()
        if self._unread_bytes > _READ_AHEAD_BYTES and self._reading and self._transport is not None:
            self._reading = False
            self._transport.pause_reading()

    def eof_received(self) -> bool:
        self._finish("the peer closed the connection in the middle of a message" if self._buffer else "")
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._finish("closed" if error is None else format_error(error))

    def _peer(self) -> str:
        return "" if self._transport is None else f"from {self._transport.get_extra_info('peername')}"

    def _broken(self, reason: str) -> StreamBroken:
        return StreamRefused(reason) if self._refused else StreamBroken(reason)

    def _reject(self, reason: str) -> None:
        self._finish(reason)
        if self._transport is not None:
            self._transport.abort()

    def _finish(self, reason: str) -> None:
        """Record the end and wake reader and writer. The first reason stays."""
        if self._end_reason is None:
            self._end_reason = reason
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
    """Connect to HOST:PORT, and wait until the other end is authenticated.

    Whether it accepts our own certificate is known only with its first message. Raise OSError (StreamBroken),
    or ValueError if the address is not HOST:PORT.
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
class StreamAccess:
    """Who may open a stream, and how others are refused."""

    transport: Transport
    # Ignored without TLS.
    roles: frozenset[Role]
    # Builds the message that tells a refused client the reason.
    refusal: Callable[[str], Message]


@asynccontextmanager
async def serve_streams(
    listen: str,
    received: type[Received],
    serve: Callable[[MessageStream[Received]], Awaitable[None]],
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    access: StreamAccess | None = None,
) -> AsyncIterator[str]:
    """Serve each connection to HOST:PORT (port 0: any free one) until `serve` returns or the block ends.

    Yield HOST:PORT as listened on. At the end open streams are closed. An exception of `serve` is logged and
    ends its stream only. `access` None: to everyone, without TLS. Raise ListenError.
    """
    host, _, port = listen.rpartition(":")
    serving: set[asyncio.Task[None]] = set()

    async def run(stream: MessageStream[Received], peer: str) -> None:
        try:
            if access is None or await _admitted(stream, access, peer):
                await serve(stream)
        finally:
            stream.close()

    class Accepted(MessageStream[Received]):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            peer = str(transport.get_extra_info("peername"))
            task = run_once(_LOOP, partial(run, self, peer))
            serving.add(task)
            task.add_done_callback(serving.discard)

    def accept() -> Accepted:
        tls = None if access is None else access.transport.accept()
        return Accepted(received, max_message_bytes, tls)

    try:
        server = await asyncio.get_running_loop().create_server(accept, host.strip("[]"), int(port))
    except OSError as error:
        raise ListenError.of("--stream-port", listen, listen_reason(error)) from error
    try:
        yield f"{host}:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await cancel(*serving)


async def _admitted(stream: MessageStream[Received], access: StreamAccess, peer: str) -> bool:
    """Return whether the other end may open a stream; if not, tell it why."""
    if stream.tls is None:
        return True
    try:
        async with asyncio.timeout(_HANDSHAKE_S):
            await stream.opened()
    except TimeoutError:
        reason = f"no TLS handshake within {_HANDSHAKE_S:g} s"
    except StreamBroken as error:
        reason = str(error)
    else:
        reason = _role_mismatch(stream.tls, access.roles)
        if not reason:
            return True
        log.warning("refused a stream from %s: %s", peer, reason)
        with contextlib.suppress(TimeoutError, StreamBroken):
            stream.send(access.refusal(reason))
            # The client closes once it has read this.
            async with asyncio.timeout(_REFUSED_S):
                while await stream.read() is not None:
                    pass
        return False
    log.warning("refused a stream from %s: %s", peer, reason)
    return False


def _role_mismatch(tls: TlsSession, roles: frozenset[Role]) -> str:
    """Return why the other end may not open a stream here; empty if it may."""
    try:
        peer = tls.peer
    except NoIdentity as error:
        return str(error)
    if peer.role in roles:
        return ""
    needed = " or ".join(sorted(role.value for role in roles))
    return f"the certificate of {peer.name} has role {peer.role.value}; this stream requires {needed}"
