"""Read and write the file of tenants and keys."""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec
from prometheus_client import CollectorRegistry, Gauge

from tailrace.bounded import read_regular, shown
from tailrace.files import file_stamp, replace_file
from tailrace.tenancy.keys import EDGES, ApiKey, KeyIndex, Tenant, TenantKeys

log = logging.getLogger(__name__)

# Longest time until a change of the file is noticed.
_POLL_S: Final = 1.0


class KeyFileUnusable(Exception):
    """The file cannot be read or is damaged; the message says which."""


class _Stored(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file's content. Both fields are always written, so one that is missing has been lost."""

    tenants: tuple[Tenant, ...]
    keys: tuple[ApiKey, ...]

    def __post_init__(self) -> None:
        """Check what concerns several entries. Raise ValueError, which names the field."""
        names: set[str] = set()
        for place, tenant in enumerate(self.tenants):
            if tenant.name in names:
                raise ValueError(f"{shown(tenant.name)} is there twice - at `$.tenants[{place}].name`")
            names.add(tenant.name)
        key_ids: set[str] = set()
        for place, key in enumerate(self.keys):
            if key.key_id in key_ids:
                raise ValueError(f"{shown(key.key_id)} is there twice - at `$.keys[{place}].key_id`")
            key_ids.add(key.key_id)
            # That of edges has none.
            if key.tenant not in ({""} if key.key_id == EDGES else names):
                raise ValueError(f"there is no tenant {shown(key.tenant)} - at `$.keys[{place}].tenant`")


class KeyFile:
    """Follow the file. While it is unusable, it is read again at each check, and the last usable keys stay in
    force."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Read the file. `clock`: seconds. Raise KeyFileUnusable."""
        self._path = path
        self._clock = clock
        self._stamp = file_stamp(path)
        self._index = KeyIndex(read_keys(path))
        self._next_check_s = clock() + _POLL_S
        # Why the file is unusable; empty if it is not.
        self._problem = ""

    def index(self) -> KeyIndex:
        """Return the keys in force now."""
        self._check()
        return self._index

    def problem(self) -> str:
        """Return why the file is unusable now; empty if it is not."""
        self._check()
        return self._problem

    def _check(self) -> None:
        now_s = self._clock()
        if now_s < self._next_check_s:
            return
        self._next_check_s = now_s + _POLL_S
        stamp = file_stamp(self._path)
        if stamp == self._stamp and not self._problem:
            return
        try:
            self._index = KeyIndex(read_keys(self._path))
        except KeyFileUnusable as error:
            if str(error) != self._problem:
                log.error("%s; the previous keys stay in force, revoked ones included", error)
            self._problem = str(error)
            return
        if self._problem:
            log.warning("%s: readable again; its keys are in force", self._path)
        self._stamp, self._problem = stamp, ""


def register_key_file(registry: CollectorRegistry, file: KeyFile) -> None:
    """Export whether a process can read its file of keys."""
    unusable = Gauge(
        "tailrace_api_keys_unusable",
        "1 while the file of API keys cannot be read: earlier keys stay in force.",
        registry=registry,
    )
    unusable.set_function(lambda: float(bool(file.problem())))


def read_keys(path: Path) -> TenantKeys:
    """Read the file. Raise KeyFileUnusable."""
    makes = f"tailrace keys make TENANT --file {path}"
    try:
        stored = msgspec.json.decode(read_regular(path), type=_Stored)
        return TenantKeys(tenants=stored.tenants, keys=stored.keys)
    except FileNotFoundError as error:
        raise KeyFileUnusable(
            f"{path}: {error.strerror}; restore a copy, or {makes} makes one with new keys"
        ) from error
    except OSError as error:
        raise KeyFileUnusable(f"{path}: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise KeyFileUnusable(
            f"{path}: no usable file of API keys ({error}); restore a copy of it, or remove it: "
            f"{makes} then makes one with new keys"
        ) from error


def readers_problem(path: Path) -> str:
    """Return why front ends may be unable to read the file; empty if nothing suggests it.

    Raise OSError.
    """
    status = path.stat()
    others = status.st_mode & (stat.S_IROTH | (stat.S_IRGRP if status.st_gid else 0))
    if status.st_uid or others or any(name.startswith("system.posix_acl") for name in _attributes(path)):
        return ""
    return (
        f"{path}: only root can read it, which suits front ends that run as root; one that runs as another "
        "user keeps the keys that it read before, revoked ones included (chgrp to its group)"
    )


@contextmanager
def locked_key_file(path: Path) -> Iterator[Callable[[TenantKeys], None]]:
    """Lock the file's folder for the block; yield a function that replaces the file (see replace_file). Raise
    OSError."""
    folder = os.open(path.resolve().parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)

        def replace(tenant_keys: TenantKeys) -> None:
            replace_file(path, msgspec.json.format(msgspec.json.encode(tenant_keys)) + b"\n", 0o640)

        yield replace
    finally:
        os.close(folder)


def _attributes(path: Path) -> list[str]:
    try:
        return os.listxattr(path)
    except OSError:
        return []
