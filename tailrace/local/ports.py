"""Ports for the parts of a local cluster."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence
from typing import Final

LOOPBACK: Final = "127.0.0.1"


class PortUnavailable(RuntimeError):
    """The port that users were to reach cannot be had."""


def require_free(host: str, port: int) -> None:
    """Raise PortUnavailable, saying what to do, when nothing could listen on the port."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortUnavailable(
                    f"port {port} on {host} is taken; stop what listens there or choose another: "
                    f"tailrace up --port {_neighbour(port)} (make up PORT={_neighbour(port)})"
                ) from error
            raise PortUnavailable(
                f"cannot listen on {host}:{port} ({error.strerror}); choose another with --port"
            ) from error


def free_ports(count: int) -> Sequence[int]:
    """So many different ports of the loopback interface that nothing listens on.

    Between this and a part's own bind another process may take one; the part then ends and says so.
    """
    sockets = [socket.socket(socket.AF_INET, socket.SOCK_STREAM) for _ in range(count)]
    try:
        for held in sockets:
            held.bind((LOOPBACK, 0))
        return [held.getsockname()[1] for held in sockets]
    finally:
        for held in sockets:
            held.close()


def _neighbour(port: int) -> int:
    return port + 1 if port < 65535 else port - 1
