"""The sockets that an API server inherits: HTTP, and the two that its engine core connects to."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from tailrace.service.listening import ListenError, listen_reason
from tailrace.service.retransmission import bound_retransmission

_OPTION: Final = "--http"
# Connections of one engine core; more than one only while it reconnects.
_BACKLOG: Final = 16
# Bound of the retransmission interval towards clients: above any usual round-trip time, and short enough that
# a stream continues within two seconds of a network outage.
_RETRANSMIT_S: Final = 2.0
# A client that acknowledges nothing, or takes nothing, for this long is disconnected.
_GIVE_UP_S: Final = 300.0


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
        paths = (folder / "in", folder / "out")
        bound: list[socket.socket] = []
        for path in paths:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            bound.append(sock)
            sock.bind(str(path))
            sock.listen(_BACKLOG)
        return cls(bound[0], bound[1], *paths)

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
        bound_retransmission(sock, _RETRANSMIT_S, _GIVE_UP_S)
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise PortTaken.of(_OPTION, address, listen_reason(error)) from error
    return sock


def is_listening(sock: socket.socket) -> bool:
    """Return whether a process that shares this socket has called listen()."""
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
