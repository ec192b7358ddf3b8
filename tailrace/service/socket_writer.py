"""Writes to a socket from any thread, without ever waiting.

An event loop's transport may be written by its own thread alone. To hand each message over to that thread
costs a wake-up and, in a process whose other thread computes, two hand-overs of the interpreter lock: more
than the write itself, which the kernel nearly always takes at once.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable


class SocketWriter:
    """What the kernel does not take at once is kept, and written by the event loop when it does."""

    def __init__(self, to: socket.socket, drained: Callable[[OSError | None], None]) -> None:
        """`to`: a non-blocking stream socket, from now on the writer's own. `drained` is called on the
        running event loop whenever nothing is kept any more: it was written, or the error says why never."""
        self._socket = to
        self._drained = drained
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._kept = bytearray()
        # When the kernel last took some of it, or when there began to be some; seconds of the monotonic
        # clock.
        self._moved_s = 0.0
        self._watching = False
        self._closed = False

    @property
    def kept_bytes(self) -> int:
        """Bytes that the kernel has not taken yet."""
        return len(self._kept)

    def stalled_s(self, now_s: float) -> float:
        """For how many seconds the kernel has taken nothing of what is kept; 0 while nothing is kept."""
        return max(0.0, now_s - self._moved_s) if self._kept else 0.0

    def write(self, data: bytes) -> None:
        """Write, whole and in order. Any thread. Raises OSError when the connection is over."""
        with self._lock:
            if self._closed:
                raise ConnectionAbortedError("closed")
            if self._kept:
                self._kept += data
                return
            try:
                sent = self._socket.send(data)
            except BlockingIOError:
                sent = 0
            if sent < len(data):
                self._kept += memoryview(data)[sent:]
                self._moved_s = time.monotonic()
                self._loop.call_soon_threadsafe(self._watch)

    def close(self) -> None:
        """Drop what is kept, and close the socket. On the event loop; closing twice is allowed."""
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
                sent = self._socket.send(self._kept)
            except BlockingIOError:
                return
            except OSError as error:
                failed, sent = error, len(self._kept)
            del self._kept[:sent]
            self._moved_s = time.monotonic()
            if self._kept:
                return
            self._unwatch()
        self._drained(failed)
