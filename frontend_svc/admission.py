"""One byte in shared memory that tells the API server whether a new request can be taken at all.

The API server answers 503 or 429 before it starts a response; once a stream has begun, its status is 200
whatever happens. Only `frontend_svc` knows the fleet, and asking it for every request would cost a round
trip.
"""

from __future__ import annotations

import enum
import mmap
import os
from pathlib import Path


class AdmissionState(enum.IntEnum):
    """What becomes of a new request."""

    OPEN = 0
    # No instance can take it: 503.
    NO_INSTANCE = 1
    # The front end carries as many requests as it may: 429.
    FULL = 2


class AdmissionFlag:
    """The writer's side, in `frontend_svc`. Starts open: requests may wait for the first instance."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes([AdmissionState.OPEN]))
        self._map = _map(path, mmap.PROT_READ | mmap.PROT_WRITE)
        self.path = path

    def set(self, state: AdmissionState) -> None:
        """What new requests are told from now on."""
        self._map[0] = state


class AdmissionReader:
    """The reader's side, in the API server."""

    def __init__(self, path: Path) -> None:
        self._map = _map(path, mmap.PROT_READ)

    def read(self) -> AdmissionState:
        """What becomes of a new request now."""
        return AdmissionState(self._map[0])


def _map(path: Path, protection: int) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR if protection & mmap.PROT_WRITE else os.O_RDONLY)
    try:
        return mmap.mmap(fd, 1, prot=protection)
    finally:
        os.close(fd)
