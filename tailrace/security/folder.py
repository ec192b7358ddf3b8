"""Credentials that follow their files."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tailrace.security.credentials import (
    AUTHORITIES,
    CERTIFICATE,
    KEY,
    Credentials,
    UnusableCredentials,
    read_credentials,
)
from tailrace.security.roles import Role

log = logging.getLogger(__name__)

# How soon a change is seen, at most; the files are looked at when somebody asks for them.
_POLL_S: Final = 1.0

_Stamp = tuple[tuple[int, int, int], ...]


class CredentialFolder:
    """The credentials in a folder, read again when its files change.

    What cannot be used is left alone, and what was read before stays in use: files may be replaced one after
    the other, and a mistake must not cut off a service that runs.
    """

    def __init__(
        self, path: Path, roles: frozenset[Role], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`roles`: those that will do here. `clock`: seconds. Raises UnusableCredentials."""
        self._path = path
        self._roles = roles
        self._clock = clock
        # gRPC asks on threads of its own.
        self._lock = threading.Lock()
        self._stamp = self._look()
        self._credentials = self._read()
        self._version = 0
        self._look_at_s = clock() + _POLL_S
        # Files that could not be used, by their stamp, and whether that was said.
        self._failed: _Stamp = ()
        self._said = False

    @property
    def path(self) -> Path:
        """The folder."""
        return self._path

    def current(self) -> Credentials:
        """The latest that can be used. Any thread."""
        return self.versioned()[1]

    def versioned(self) -> tuple[int, Credentials]:
        """The same, with a number that changes when they do. Any thread."""
        with self._lock:
            now_s = self._clock()
            if now_s >= self._look_at_s:
                self._look_at_s = now_s + _POLL_S
                self._refresh()
            return self._version, self._credentials

    def _refresh(self) -> None:
        stamp = self._look()
        if stamp == self._stamp:
            return
        try:
            self._credentials = self._read()
        except UnusableCredentials as error:
            # At the first sight it may be half of a replacement.
            if stamp != self._failed:
                self._failed, self._said = stamp, False
            elif not self._said:
                self._said = True
                log.error("%s; the certificate of before stays in use", error)
            return
        self._stamp = stamp
        self._version += 1
        log.info("%s: new certificate, valid until %s", self._path, _day(self._credentials.not_after_s))

    def _look(self) -> _Stamp:
        found: list[tuple[int, int, int]] = []
        for name in (AUTHORITIES, CERTIFICATE, KEY):
            try:
                status = (self._path / name).stat()
            except OSError:
                found.append((0, 0, 0))
            else:
                found.append((status.st_mtime_ns, status.st_ino, status.st_size))
        return tuple(found)

    def _read(self) -> Credentials:
        credentials = read_credentials(self._path)
        if credentials.identity.role not in self._roles:
            needed = " or ".join(sorted(role.value for role in self._roles))
            raise UnusableCredentials(
                f"{self._path / CERTIFICATE}: it is of role {credentials.identity.role.value}; "
                f"{needed} is needed here"
            )
        return credentials


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(seconds))
