"""Read and write the file of tenants and keys."""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from tailrace.tenancy.keys import KeyIndex, TenantKeys

log = logging.getLogger(__name__)

# Longest time until a change of the file is noticed.
_POLL_S: Final = 1.0


class KeyFileUnusable(Exception):
    """The file cannot be read or is damaged; the message says which."""


class KeyFile:
    """Follow the file. While it is unusable, the last usable keys stay in force."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Read the file. `clock`: seconds. Raise KeyFileUnusable."""
        self._path = path
        self._clock = clock
        self._stamp = _stamp(path)
        self._index = KeyIndex(read_keys(path))
        self._next_check_s = clock() + _POLL_S

    def index(self) -> KeyIndex:
        """Return the keys in force now."""
        now_s = self._clock()
        if now_s >= self._next_check_s:
            self._next_check_s = now_s + _POLL_S
            stamp = _stamp(self._path)
            if stamp != self._stamp:
                self._stamp = stamp
                try:
                    self._index = KeyIndex(read_keys(self._path))
                except KeyFileUnusable as error:
                    log.error("%s; the previous keys stay in force", error)
        return self._index


def read_keys(path: Path) -> TenantKeys:
    """Read the file. Raise KeyFileUnusable."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=TenantKeys)
    except OSError as error:
        raise KeyFileUnusable(f"{path}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise KeyFileUnusable(f"{path}: {error}") from error


@contextmanager
def locked_key_file(path: Path) -> Iterator[Callable[[TenantKeys], None]]:
    """Lock the file for the block; yield a function that replaces it atomically. Raise OSError."""
    with path.with_name(f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def replace(tenant_keys: TenantKeys) -> None:
            partial = path.with_name(f".{path.name}.partial")
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o640)
            with open(descriptor, "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(tenant_keys)) + b"\n")
                file.flush()
                os.fsync(descriptor)
            partial.replace(path)

        yield replace


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        status = path.stat()
    except OSError:
        return (0, 0, 0)
    return status.st_mtime_ns, status.st_ino, status.st_size
