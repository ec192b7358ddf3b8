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
"""Where Linux's ports for outgoing connections begin: any of those may be taken at any moment."""


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
                    f"port {port} on {host} is in use; stop the process that listens there or choose "
                    f"another port: tailrace up --port {_neighbour(port)} (make up PORT="
                    f"{_neighbour(port)})"
                ) from error
            raise PortUnavailable(
                f"cannot listen on {host}:{port} ({error.strerror}); choose another with --port"
            ) from error


def free_ports(count: int) -> Sequence[int]:
    """So many different ports of the loopback interface that nothing listens on.

    They lie below those that the system gives to outgoing connections, so only another that looks for a
    port to listen on could take one before its part binds it; they are drawn at random, so that two who look
    at once hardly meet. Raises PortUnavailable when there are not so many.
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
        # As the parts will: a port whose last connections are still timing out can be listened on.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def _neighbour(port: int) -> int:
    return port + 1 if port < 65535 else port - 1
