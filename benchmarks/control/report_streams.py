"""Report streams of many synthetic workers over HTTP/2, for a fraction of what gRPC's Python client costs.

Only what a stream of reports needs of gRPC over HTTP/2 (RFC 9113): messages are sent as flow control allows,
and replies are dropped unread. The workers of a fleet run on other machines; here they take CPU time from the
control plane.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from typing import Final, cast

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_ACK: Final = 0x1
_END_STREAM: Final = 0x1
_END_HEADERS: Final = 0x4
_HEADER_BYTES: Final = 9
_INITIAL_WINDOW_SIZE: Final = 4
_ENABLE_PUSH: Final = 2
_DEFAULT_WINDOW: Final = 65_535
# For replies; so large that it need not be renewed.
_OWN_WINDOW: Final = (1 << 31) - 1
_FRAME_BYTES_MAX: Final = 16_384


class ReportStreams(asyncio.Protocol):
    """The streams of one connection. `closed`: ends with a ConnectionError when any of them does."""

    def __init__(self, authority: str, method: str) -> None:
        """`authority`: HOST:PORT of the monitor."""
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = _request_headers(authority, method)
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._next_stream = 1
        # Bytes that may be sent: on the connection, and on each stream.
        self._window = _DEFAULT_WINDOW
        self._initial_window = _DEFAULT_WINDOW
        self._windows: dict[int, int] = {}
        # What is left to send, in order, and who waits for it.
        self._unsent: deque[tuple[int, bytes, asyncio.Future[None]]] = deque()

    def open(self) -> int:
        """Open a stream; return its number."""
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        self._windows[stream] = self._initial_window
        self._write(_HEADERS, _END_HEADERS, stream, self._request)
        return stream

    async def send(self, stream: int, message: bytes) -> None:
        """Send a message; wait while flow control does not allow it. Raise ConnectionError."""
        if self.closed.done():
            return self.closed.result()
        framed = b"\0" + struct.pack(">I", len(message)) + message
        if not self._unsent and self._fits(stream, len(framed)):
            self._send(stream, framed)
            return None
        sent: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._unsent.append((stream, framed, sent))
        return await sent

    # ---- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the connection."""
        # uvloop's transports do not derive from asyncio's classes.
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(_PREFACE)
        settings = struct.pack(">HIHI", _ENABLE_PUSH, 0, _INITIAL_WINDOW_SIZE, _OWN_WINDOW)
        self._write(_SETTINGS, 0, 0, settings)
        self._write(_WINDOW_UPDATE, 0, 0, struct.pack(">I", _OWN_WINDOW - _DEFAULT_WINDOW))

    def connection_lost(self, exc: Exception | None) -> None:
        """End all streams."""
        self._end("the monitor has closed the connection")

    def data_received(self, data: bytes) -> None:
        """Process whole frames."""
        self._received += data
        begin = 0
        while len(self._received) - begin >= _HEADER_BYTES:
            high, low, kind, flags, stream = struct.unpack_from(">BHBBI", self._received, begin)
            end = begin + _HEADER_BYTES + (high << 16 | low)
            if len(self._received) < end:
                break
            self._frame(kind, flags, stream, bytes(self._received[begin + _HEADER_BYTES : end]))
            begin = end
        del self._received[:begin]

    # ---- internal

    def _frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _SETTINGS and not flags & _ACK:
            for setting, value in struct.iter_unpack(">HI", payload):
                if setting == _INITIAL_WINDOW_SIZE:
                    self._windows = {s: w + value - self._initial_window for s, w in self._windows.items()}
                    self._initial_window = value
            self._write(_SETTINGS, _ACK, 0, b"")
            self._send_more()
        elif kind == _PING and not flags & _ACK:
            self._write(_PING, _ACK, 0, payload)
        elif kind == _WINDOW_UPDATE:
            (more,) = struct.unpack(">I", payload)
            if stream:
                self._windows[stream] += more
            else:
                self._window += more
            self._send_more()
        elif kind in (_RST_STREAM, _GOAWAY) or (kind in (_DATA, _HEADERS) and flags & _END_STREAM):
            self._end("the monitor has ended a stream of reports")

    def _fits(self, stream: int, size: int) -> bool:
        return size <= self._window and size <= self._windows[stream]

    def _send_more(self) -> None:
        """Send what now fits, in order, in part if need be: a message may be larger than a window."""
        while self._unsent:
            stream, framed, sent = self._unsent[0]
            size = min(len(framed), self._window, self._windows[stream])
            if size <= 0:
                return
            self._send(stream, framed[:size])
            if size < len(framed):
                self._unsent[0] = stream, framed[size:], sent
                return
            self._unsent.popleft()
            if not sent.done():
                sent.set_result(None)

    def _send(self, stream: int, framed: bytes) -> None:
        self._window -= len(framed)
        self._windows[stream] -= len(framed)
        for begin in range(0, len(framed), _FRAME_BYTES_MAX):
            self._write(_DATA, 0, stream, framed[begin : begin + _FRAME_BYTES_MAX])

    def _write(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if self._transport is not None:
            size = len(payload)
            header = struct.pack(">BHBBI", size >> 16, size & 0xFFFF, kind, flags, stream)
            self._transport.write(header + payload)

    def _end(self, reason: str) -> None:
        error = ConnectionError(reason)
        if not self.closed.done():
            self.closed.set_exception(error)
        for _, _, sent in self._unsent:
            if not sent.done():
                sent.set_exception(error)
        self._unsent.clear()


def _request_headers(authority: str, method: str) -> bytes:
    """Return a gRPC call's header block, in HPACK's static table and literals (RFC 7541)."""
    return b"".join(
        [
            b"\x83",  # :method POST
            b"\x86",  # :scheme http
            b"\x04" + _literal(method),  # :path
            b"\x01" + _literal(authority),  # :authority
            b"\x0f\x10" + _literal("application/grpc"),  # content-type
            b"\x00" + _literal("te") + _literal("trailers"),
        ]
    )


def _literal(text: str) -> bytes:
    """Return a string of less than 127 bytes, not Huffman-coded."""
    encoded = text.encode()
    return bytes([len(encoded)]) + encoded
