"""The sockets that an API server inherits: HTTP, and the two that its engine core connects to."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import logging
import socket
import struct
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from tailrace.service.sockets import ListenError, bound_clients, listen_reason, unix_path

_OPTION: Final = "--http"
# Connections of one engine core; more than one only while it reconnects.
_BACKLOG: Final = 16


class PortTaken(ListenError):
    """Another program listens on the address; the message is one line for the operator."""


@dataclass(frozen=True, slots=True)
class EngineSockets(AbstractContextManager["EngineSockets"]):
    """Hold the listening unix sockets: `input` is a ROUTER of the API server, `output` a PULL."""

    input: socket.socket
    output: socket.socket
    input_path: Path
    output_path: Path

    @classmethod
    def bind(cls, folder: Path) -> Self:
        """Bind both in a private folder. Raise OSError."""
        paths = (unix_path(folder, "in"), unix_path(folder, "out"))
        bound: list[socket.socket] = []
        for path in paths:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            bound.append(sock)
            sock.bind(path)
            sock.listen(_BACKLOG)
        return cls(bound[0], bound[1], *map(Path, paths))

    @property
    def input_address(self) -> str:
        """Return the ZMQ address of the API server's ROUTER."""
        return f"ipc://{self.input_path}"

    @property
    def output_address(self) -> str:
        """Return the ZMQ address of the API server's PULL."""
        return f"ipc://{self.output_path}"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close them here; an API server that has inherited them keeps them."""
        self.input.close()
        self.output.close()


def split_address(address: str) -> tuple[str, int]:
    """Split `host:port`; the host may be a bracketed IPv6 address. Raise ValueError."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{address!r} is not HOST:PORT")
    return host.strip("[]") or "0.0.0.0", int(port)


def bind_http(address: str, is_ours: Callable[[], bool]) -> socket.socket:
    """Bind an HTTP socket without listening (the API server listens once it can answer).

    Front ends of one cluster share a port through SO_REUSEPORT, which would also share it with any other
    program of this user that sets the option (gRPC servers do). So a first socket without the option tries
    the port; if it is in use, `is_ours()` must know the user as a front end of this cluster. The API server's
    connections inherit the socket's TCP options.

    Raise PortTaken if the port belongs to another program or the address is not one of this machine.
    """
    host, port = split_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    if port:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE or not is_ours():
                    raise PortTaken.of(_OPTION, address, listen_reason(error)) from error
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound_clients(sock)
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise PortTaken.of(_OPTION, address, listen_reason(error)) from error
    return sock


def is_listening(sock: socket.socket) -> bool:
    """Return whether a process that shares this socket has called listen()."""
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


async def first_connection(listening: socket.socket) -> None:
    """Wait until somebody connects to a listening socket."""
    loop = asyncio.get_running_loop()
    connected = asyncio.Event()
    loop.add_reader(listening.fileno(), connected.set)
    try:
        await connected.wait()
    finally:
        loop.remove_reader(listening.fileno())


# Close a listening socket that several processes share without a client noticing.
#
# Closing a listening socket resets the connections that the kernel has completed but nobody has accepted yet.
# So first no new ones are made: a filter on the socket drops every SYN. A client repeats its SYN after a
# second (RFC 6298), which then reaches whoever listens on the port by then: another front end that shares it,
# or this one after a restart. Then the connections that exist are accepted, and the socket can be closed.

log = logging.getLogger(__name__)

# Linux, include/uapi/asm-generic/socket.h and include/uapi/linux/filter.h.
_SO_ATTACH_FILTER: Final = 26
_INSTRUCTION: Final = struct.Struct("HBBI")
_LOAD_BYTE, _JUMP_IF_SET, _RETURN = 0x30, 0x45, 0x06
# Offset of the flags in a TCP header, where the filter's view of a packet begins, and the SYN bit.
_FLAGS_OFFSET: Final = 13
_SYN: Final = 0x02
_PROGRAM: Final = (
    (_LOAD_BYTE, 0, 0, _FLAGS_OFFSET),
    (_JUMP_IF_SET, 0, 1, _SYN),
    # Return values: drop the packet, or keep all of it.
    (_RETURN, 0, 0, 0),
    (_RETURN, 0, 0, 0xFFFFFFFF),
)
# include/uapi/linux/tcp.h: of a listening socket tcpi_unacked counts connections that wait to be accepted.
_TCP_INFO_BYTES: Final = 104
_UNACKED_OFFSET: Final = 24

# Time for handshakes in progress to finish and for the first bytes on new connections to be read.
_HANDSHAKE_S: Final = 0.25
_ACCEPT_S: Final = 2.0
_POLL_S: Final = 0.01


async def stop_accepting(listening: socket.socket) -> None:
    """Stop new connections and wait until the existing ones are accepted. Takes 2.25 s at most."""
    try:
        _drop_syns(listening)
    except OSError as error:
        log.debug("cannot filter SYNs, new connections will be reset: %s", error)
        return
    try:
        async with asyncio.timeout(_ACCEPT_S):
            # Another process accepts: there is no event to wait for.
            while waiting_connections(listening):  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        log.warning("%d connections were not accepted in time", waiting_connections(listening))
    await asyncio.sleep(_HANDSHAKE_S)


def _drop_syns(listening: socket.socket) -> None:
    program = ctypes.create_string_buffer(b"".join(_INSTRUCTION.pack(*line) for line in _PROGRAM))
    # struct sock_fprog: number of instructions, and their address.
    fprog = struct.pack("HP", len(_PROGRAM), ctypes.addressof(program))
    listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, fprog)


def waiting_connections(listening: socket.socket) -> int:
    """Return how many connections to a listening socket nobody has accepted yet."""
    info = listening.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    unacked: int = struct.unpack_from("I", info, _UNACKED_OFFSET)[0]
    return unacked
