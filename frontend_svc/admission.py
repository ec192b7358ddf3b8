"""One byte in shared memory that tells the front half whether a new request can be placed at all.

The front half answers 503 before it starts a response; once a stream has begun, its status is 200 whatever
happens. Only `frontend_svc` knows the fleet, and asking it for every request would cost a round trip.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Final

_OPEN: Final = 0
_CLOSED: Final = 1


class AdmissionFlag:
    """The writer's side, in `frontend_svc`. Starts open: requests may wait for the first instance."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes([_OPEN]))
        self._map = _map(path, mmap.PROT_READ | mmap.PROT_WRITE)
        self.path = path

    def open(self) -> None:
        """New requests are welcome."""
        self._map[0] = _OPEN

    def close(self) -> None:
        """New requests are refused with 503."""
        self._map[0] = _CLOSED


class AdmissionReader:
    """The reader's side, in the front half."""

    def __init__(self, path: Path) -> None:
        self._map = _map(path, mmap.PROT_READ)

    @property
    def is_open(self) -> bool:
        """Whether a new request may be taken."""
        return self._map[0] == _OPEN


def _map(path: Path, protection: int) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR if protection & mmap.PROT_WRITE else os.O_RDONLY)
    try:
        return mmap.mmap(fd, 1, prot=protection)
    finally:
        os.close(fd)
