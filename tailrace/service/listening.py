"""Say why an address cannot be listened on, and name the option that gave it."""

from __future__ import annotations

import errno
import socket
from typing import Self


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
