"""What services add to sockets: an end of waiting for a vanished peer, a reason why an address is refused,
and a writer for any thread.

While nothing is acknowledged, the kernel doubles the interval between retransmissions, from about 0.2 s up to
two minutes (RFC 6298, section 5.5). After an outage, a connection with unacknowledged data therefore stays
silent for up to as long again as the outage lasted. Linux 6.15 and later can bound the interval of a socket.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Self

# Linux, include/uapi/linux/tcp.h.
_TCP_RTO_MAX_MS: Final = 44
# Above any usual round-trip time, and short enough that a stream continues within two seconds of a network
# outage.
_CLIENT_RETRANSMIT_S: Final = 2.0
CLIENT_GIVE_UP_S: Final = 300.0
"""A client that acknowledges nothing, or takes nothing, for this long is disconnected."""
# Linux, include/uapi/linux/un.h: 108 with the zero at the end.
_UNIX_PATH_BYTES: Final = 107
# The answer of a kernel without the option.
_UNSUPPORTED: Final = frozenset({errno.ENOPROTOOPT, errno.EOPNOTSUPP})


def probe_when_idle(sock: socket.socket, after_s: int, every_s: int, probes: int) -> None:
    """Have the kernel probe the other end of an idle connection, after `after_s` seconds and then every
    `every_s` seconds, and end the connection once `probes` in a row are not answered.

    So a peer whose host or network has vanished is noticed after `after_s + every_s * probes` seconds. One
    that only does not read still answers.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, after_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, probes)


def bound_retransmission(sock: socket.socket, interval_s: float, give_up_s: float) -> bool:
    """Retransmit at least every `interval_s` seconds; give up after `give_up_s` without progress.

    Connections inherit both from the listening socket. `interval_s` is at least 1, the minimum of the kernel.
    `give_up_s` also bounds for how long the other end may leave its receive window closed.

    Return False if the kernel cannot bound the interval; then only `give_up_s` applies. Raise OSError if the
    socket is not a TCP socket or is closed.
    """
    # The kernel's own limit is a number of retransmissions: with short intervals it would give up in seconds.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(give_up_s * 1e3))
    try:
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, round(interval_s * 1e3))
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        return False
    return True


def bound_clients(sock: socket.socket) -> list[tuple[int, int]]:
    """Bound the retransmission of clients' connections, which inherit it from this listening socket.

    Return the TCP options that were set, number and value, for a server that makes its own socket. Raise
    OSError.
    """
    options = [(socket.TCP_USER_TIMEOUT, round(CLIENT_GIVE_UP_S * 1e3))]
    if bound_retransmission(sock, _CLIENT_RETRANSMIT_S, CLIENT_GIVE_UP_S):
        options.append((_TCP_RTO_MAX_MS, round(_CLIENT_RETRANSMIT_S * 1e3)))
    return options


def unix_path(folder: Path, name: str) -> str:
    """Return the path of a Unix socket in a temporary folder. Raise OSError if it is too long for one."""
    path = str(folder / name)
    if len(os.fsencode(path)) > _UNIX_PATH_BYTES:
        raise OSError(
            f"{path}: too long for a socket, whose path has at most {_UNIX_PATH_BYTES} bytes; name a folder "
            "with a shorter path (TMPDIR, or --ipc-folder of a front end)"
        )
    return path


class ListenError(OSError):
    """The address cannot be listened on; the message is one line that names the option and the address."""

    @classmethod
    def of(cls, option: str, address: str, reason: str) -> Self:
        """Return the error of `option` (such as --listen) with this HOST:PORT."""
        return cls(f"{option}: cannot listen on {address}: {reason}")


def require_listenable(option: str, address: str) -> None:
    """Raise ListenError if HOST:PORT, the value of `option`, cannot be listened on now.

    For services that take long to start: what they find only then would be found minutes later.
    """
    if reason := listen_problem(address):
        raise ListenError.of(option, address, reason)


def listen_problem(address: str) -> str:
    """Return why HOST:PORT cannot be bound; empty if it can."""
    host, _, port = address.rpartition(":")
    try:
        family, kind, protocol, _, resolved = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(resolved)
            probe.listen()
    except OSError as error:
        return listen_reason(error)
    return ""


def listen_reason(error: OSError) -> str:
    """Return what an error of bind() or listen() means."""
    if error.errno == errno.EADDRINUSE:
        return "the port is taken"
    if error.errno == errno.EADDRNOTAVAIL:
        return "this machine does not have that address"
    return error.strerror or str(error)


# Write to a socket from any thread without waiting.
#
# An event loop's transport may be written by its own thread only. Passing each message to that thread costs a
# wake-up and, in a process whose other thread computes, two hand-overs of the interpreter lock: more than the
# write itself, which the kernel nearly always accepts at once.


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
