"""Ports for the processes that tests start."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from itertools import chain, cycle, islice
from typing import Final

# Below the ports that `tailrace up` draws from (tailrace/local/ports.py), which tests run too.
_FIRST_PORT: Final = 10_000
_PORTS_PER_WORKER: Final = 1_000
_WORKERS: Final = 10


def _candidates() -> Iterator[int]:
    """Yield the ports of this pytest-xdist worker in turn.

    Seconds pass between the choice of a port and the start of the process that listens on it. No other test
    may choose the same port in between, as occasionally happened with random ports.
    """
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _WORKERS
    first = _FIRST_PORT + number * _PORTS_PER_WORKER
    ports = range(first, first + _PORTS_PER_WORKER)
    # Concurrent runs on one machine begin at different ports.
    start = os.getpid() % _PORTS_PER_WORKER
    return cycle(chain(ports[start:], ports[:start]))


_PORTS: Final = _candidates()


def free_port() -> int:
    """Return a free TCP port on loopback that no other test chooses soon.

    Raise RuntimeError if all ports are in use.
    """
    for port in islice(_PORTS, _PORTS_PER_WORKER):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            # As services do: allow listening on a port with connections in TIME_WAIT.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise RuntimeError(f"no free port from {_FIRST_PORT} on")
