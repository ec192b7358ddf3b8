"""Ports for the parts of a local cluster."""

from __future__ import annotations

import errno
import os
import random
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from tailrace.address import format_address

LOOPBACK: Final = "127.0.0.1"

_FIRST_PORT: Final = 20_000
_BEYOND_PORTS: Final = 32_768
"""First of Linux's ports for outgoing connections, which may be taken at any moment."""


# State of a socket in /proc/net/tcp.
_LISTENS: Final = "0A"


class PortUnavailable(RuntimeError):
    """A port is in use or cannot be bound; the message says what to do."""


def require_free(host: str, port: int) -> None:
    """Raise PortUnavailable if it is not possible to listen on the port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with ExitStack() as stack:
        try:
            probe = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                folder = _cluster_on(port)
                by, stop = (
                    (f" by the Tailrace cluster of {folder}", "stop that (tailrace down there)")
                    if folder is not None
                    else ("", "stop the process that listens there")
                )
                raise PortUnavailable(
                    f"port {port} on {host} is in use{by}; {stop} or choose "
                    f"another port: tailrace up --port {_neighbour(port)} (make up PORT="
                    f"{_neighbour(port)})"
                ) from error
            raise PortUnavailable(
                f"cannot listen on {format_address(host, port)} ({error.strerror}); choose another with "
                "--port"
            ) from error


def _cluster_on(port: int) -> Path | None:
    """Return the folder in which the cluster whose front end or edge listens on the port was started; None
    if it is none, or another user's."""
    listening = f"{port:04X}"
    sockets = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS and fields[1].endswith(f":{listening}"):
                sockets.add(f"socket:[{fields[9]}]")
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            if b"serve" not in words or not {b"frontend", b"edge"}.intersection(words):
                continue
            if sockets.intersection(os.readlink(each) for each in (process / "fd").iterdir()):
                return (process / "cwd").readlink()
        except OSError:
            continue  # it has ended, or is another user's
    return None


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
