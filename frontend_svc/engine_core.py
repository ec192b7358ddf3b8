"""The ZMQ side of a front end: to vLLM's API server, this process is engine core 0.

The API server binds a ROUTER (requests to the engine) and a PULL (outputs from it); an engine core connects a
DEALER and a PUSH, and first reports that it is ready (tailrace/wire/ready.py).
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from tailrace.service.sockets import SocketWriter
from tailrace.telemetry.incidents import unreadable
from tailrace.wire.ready import ENGINE_IDENTITY
from tailrace.wire.requests import RequestType, UtilityCall, read_abort, read_utility

log = logging.getLogger(__name__)


# An API server that reads none of its pending outputs for this long hangs. One that is only slow is waited
# for, however much is pending; engine.py sheds requests meanwhile.
STALL_S: Final = 600.0

_GREETING: Final = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
_GREETING_LENGTH: Final = 64
_MORE: Final = 0x01
_LONG: Final = 0x02
_COMMAND: Final = 0x04


def _ready(socket_type: bytes, identity: bytes = b"") -> bytes:
    properties = {b"Socket-Type": socket_type, **({b"Identity": identity} if identity else {})}
    return b"\x05READY" + b"".join(
        bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value
        for name, value in properties.items()
    )


_PUSH: Final = _ready(b"PUSH")
_DEALER: Final = _ready(b"DEALER", ENGINE_IDENTITY)


class HandshakeFailed(Exception):
    """The other end is not a ZMQ socket that accepts ours."""


class PushSocket:
    """A ZMQ PUSH socket to one unix address, written from the event loop.

    `send` never waits; what the kernel does not accept at once is written when it does. libzmq sends from a
    thread of its own, which costs a wake-up and two context switches per message: a quarter of what a decode
    step costs a front end at batch 1. A PUSH with one peer needs none of that: after the handshake it only
    writes frames. Protocol: ZMTP 3.0, https://rfc.zeromq.org/spec/23/, NULL mechanism.
    """

    def __init__(self, path: str, on_stuck: Callable[[], None]) -> None:
        """`on_stuck` is called when the other end is gone or has stopped reading; messages are then lost."""
        self._path = path
        self._on_stuck = on_stuck
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        # Set after the handshake.
        self._writer: SocketWriter | None = None

    async def connect(self) -> None:
        """Connect and complete the handshake, however long the other end takes to start.

        Raise OSError or HandshakeFailed.
        """
        await _connect(self._socket, self._path, _PUSH)
        self._writer = SocketWriter(self._socket, self._drained)

    def send(self, frames: Sequence[bytes]) -> None:
        """Send one message without waiting."""
        writer = self._writer
        if writer is None or writer.stalled_s(time.monotonic()) > STALL_S:
            self._on_stuck()
            return
        last = len(frames) - 1
        data = b"".join([_frame(frame, _MORE if i < last else 0) for i, frame in enumerate(frames)])
        try:
            writer.write(data)
        except OSError:
            self._on_stuck()

    def unread_bytes(self) -> int:
        """Return how many bytes the other end has not taken yet."""
        return 0 if self._writer is None else self._writer.buffered_bytes

    def close(self) -> None:
        """Close the socket; unsent messages are dropped."""
        if self._writer is None:
            self._socket.close()
        else:
            self._writer.close()

    def _drained(self, error: OSError | None) -> None:
        if error is not None:
            self._on_stuck()


async def _connect(connection: socket.socket, path: str, ready: bytes) -> None:
    """Connect to a ZMQ socket and complete the handshake, however long the other end takes to start.

    `ready`: our READY command. Raise OSError or HandshakeFailed.
    """
    loop = asyncio.get_running_loop()
    await loop.sock_connect(connection, path)
    await loop.sock_sendall(connection, _GREETING)
    greeting = await _read(connection, _GREETING_LENGTH)
    if greeting[0] != 0xFF or greeting[10] < 3 or greeting[12:32] != _GREETING[12:32]:
        raise HandshakeFailed(f"not a ZMTP 3 greeting with the NULL mechanism: {greeting[:32].hex()}")
    await loop.sock_sendall(connection, _frame(ready, _COMMAND))
    flags, size = await _read(connection, 2)
    if flags & _LONG:
        size = int.from_bytes(bytes([size]) + await _read(connection, 7), "big")
    command = await _read(connection, size)
    if not flags & _COMMAND or not command.startswith(b"\x05READY"):
        raise HandshakeFailed(f"expected READY, got {command[:64]!r}")


async def _read(connection: socket.socket, size: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < size:
        more = await loop.sock_recv(connection, size - len(data))
        if not more:
            raise HandshakeFailed("the peer closed the connection")
        data += more
    return data


def _frame(body: bytes, flags: int) -> bytes:
    if len(body) < 256:
        return bytes((flags, len(body))) + body
    return bytes((flags | _LONG,)) + len(body).to_bytes(8, "big") + body


class _Messages(asyncio.Protocol):
    """Pass on each message that arrives after the handshake, as its frames.

    libzmq receives in a thread of its own; to be woken by it costs several times as much as to read.
    """

    def __init__(self, on_message: Callable[[list[bytes]], None], failed: asyncio.Future[None]) -> None:
        """`failed` gets what fails in reading, other than the connection."""
        self._on_message = on_message
        self._failed = failed
        self._buffer = bytearray()
        # Those of the message that is not complete yet.
        self._frames: list[bytes] = []

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) > start:
            flags = buffer[start]
            begin = start + (9 if flags & _LONG else 2)
            if len(buffer) < begin:
                break
            end = begin + int.from_bytes(buffer[start + 1 : begin], "big")
            if len(buffer) < end:
                break
            if not flags & _COMMAND:
                self._frames.append(bytes(buffer[begin:end]))
                if not flags & _MORE:
                    frames, self._frames = self._frames, []
                    self._on_message(frames)
            start = end
        del buffer[:start]

    def connection_lost(self, error: Exception | None) -> None:
        # That the API server has ended, its exit status and `on_stuck` tell.
        if error is not None and not isinstance(error, OSError) and not self._failed.done():
            self._failed.set_exception(error)


class EngineCoreSocket:
    """Own the two sockets of engine core 0."""

    def __init__(self, input_path: Path, output_path: Path, on_stuck: Callable[[], None]) -> None:
        """Take the paths of unix sockets, to which `announce` connects. `on_stuck` is called when the API
        server has stopped reading."""
        self._input_path = str(input_path)
        self._input = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._input.setblocking(False)
        self._output = PushSocket(str(output_path), on_stuck)
        self.send = self._output.send
        self.unread_bytes = self._output.unread_bytes

    async def announce(self, ready_response: bytes) -> None:
        """Report to the API server that its engine is ready. `ready_response`: vLLM's
        EngineCoreReadyResponse.

        Waits until the API server has started. Raise OSError or HandshakeFailed.
        """
        await self._output.connect()
        await _connect(self._input, self._input_path, _DEALER)
        await asyncio.get_running_loop().sock_sendall(self._input, _frame(ready_response, 0))

    async def receive(
        self,
        on_add: Callable[[Sequence[bytes]], None],
        on_abort: Callable[[Sequence[str]], None],
        on_utility: Callable[[UtilityCall, Sequence[bytes]], None],
    ) -> None:
        """Pass every message of the API server on, until cancelled: new requests, the ids of those to abort,
        and calls of engine-core methods with their frames. None of these may block."""

        def pass_on(message: list[bytes]) -> None:
            kind, *frames = message
            try:
                match kind:
                    case RequestType.ADD:
                        on_add(frames)
                    case RequestType.ABORT:
                        on_abort(read_abort(frames))
                    case RequestType.UTILITY:
                        on_utility(read_utility(frames), frames)
                    case _:
                        log.warning("message of unknown kind %r from the API server", kind)
            except Exception as error:
                unreadable("message of the API server", kind.decode("latin-1"), error)
                log.debug("a message of the API server", exc_info=error)

        loop = asyncio.get_running_loop()
        failed: asyncio.Future[None] = loop.create_future()
        transport, _ = await loop.create_unix_connection(lambda: _Messages(pass_on, failed), sock=self._input)
        try:
            await failed
        finally:
            transport.abort()

    def close(self) -> None:
        """Close both sockets; unsent outputs are dropped."""
        self._input.close()
        self._output.close()
