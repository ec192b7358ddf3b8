"""Write to a socket from any thread without waiting.

An event loop's transport may be written by its own thread only. Passing each message to that thread costs a
wake-up and, in a process whose other thread computes, two hand-overs of the interpreter lock: more than the
write itself, which the kernel nearly always accepts at once.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable


class SocketWriter:
    """Write at once what the kernel accepts; buffer the rest, which the event loop writes when it can."""

    def __init__(self, to: socket.socket, on_drained: Callable[[OSError | None], None]) -> None:
        """Take over `to`, a non-blocking stream socket.

        `on_drained(error)` is called on the running event loop whenever the buffer becomes empty: written, or
        lost to the error.
        """
        self._socket = to
        self._on_drained = on_drained
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._buffer = bytearray()
        # When the kernel last accepted a part of the buffer, or when it began to fill; monotonic seconds.
        self._last_progress_s = 0.0
        self._watching = False
        self._closed = False

    @property
    def buffered_bytes(self) -> int:
        """Return the bytes that the kernel has not accepted yet."""
        return len(self._buffer)

    def stalled_s(self, now_s: float) -> float:
        """Return for how many seconds the kernel has accepted nothing of the buffer; 0 while it is empty."""
        return max(0.0, now_s - self._last_progress_s) if self._buffer else 0.0

    def write(self, data: bytes) -> None:
        """Write all of it, in order, from any thread. Raise OSError if the connection is closed."""
        with self._lock:
            if self._closed:
                raise ConnectionAbortedError("closed")
            if self._buffer:
                self._buffer += data
                return
            try:
                sent = self._socket.send(data)
            except BlockingIOError:
                sent = 0
            if sent < len(data):
                self._buffer += memoryview(data)[sent:]
                self._last_progress_s = time.monotonic()
                self._loop.call_soon_threadsafe(self._watch)

    def close(self) -> None:
        """Drop the buffer and close the socket. Call on the event loop; closing twice is allowed."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._unwatch()
            self._socket.close()

    def _watch(self) -> None:
        with self._lock:
            if not self._closed and not self._watching:
                self._watching = True
                self._loop.add_writer(self._socket, self._flush)

    def _unwatch(self) -> None:
        if self._watching:
            self._watching = False
            self._loop.remove_writer(self._socket)

    def _flush(self) -> None:
        failed: OSError | None = None
        with self._lock:
            try:
                sent = self._socket.send(self._buffer)
            except BlockingIOError:
                return
            except OSError as error:
                failed, sent = error, len(self._buffer)
            del self._buffer[:sent]
            self._last_progress_s = time.monotonic()
            if self._buffer:
                return
            self._unwatch()
        self._on_drained(failed)
