"""Ports for the parts of a local cluster."""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Sequence
from typing import Final

LOOPBACK: Final = "127.0.0.1"

_FIRST_PORT: Final = 20_000
_BEYOND_PORTS: Final = 32_768
"""First of Linux's ports for outgoing connections, which may be taken at any moment."""


class PortUnavailable(RuntimeError):
    """A port is in use or cannot be bound; the message says what to do."""


def require_free(host: str, port: int) -> None:
    """Raise PortUnavailable if it is not possible to listen on the port."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortUnavailable(
                    f"port {port} on {host} is in use; stop the process that listens there or choose "
                    f"another port: tailrace up --port {_neighbour(port)} (make up PORT="
                    f"{_neighbour(port)})"
                ) from error
            raise PortUnavailable(
                f"cannot listen on {host}:{port} ({error.strerror}); choose another with --port"
            ) from error


def free_ports(count: int) -> Sequence[int]:
    """Return `count` different free ports of the loopback interface.

    They are below the system's ports for outgoing connections, so only a process that looks for a port to
    listen on could take one before its part binds it; they are drawn at random, so that two such processes
    rarely collide. Raise PortUnavailable if there are too few.
    """
    ports: list[int] = []
    candidates = random.SystemRandom().sample(range(_FIRST_PORT, _BEYOND_PORTS), _BEYOND_PORTS - _FIRST_PORT)
    for port in candidates:
        if len(ports) == count:
            break
        if _is_free(port):
            ports.append(port)
    if len(ports) < count:
        raise PortUnavailable(f"of {count} ports on {LOOPBACK} only {len(ports)} are free")
    return ports


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As the parts do: allows ports with connections in TIME_WAIT.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def _neighbour(port: int) -> int:
    return port + 1 if port < 65535 else port - 1
