"""A folder of TLS credentials that is reloaded when its files change."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tailrace.files import Stamp, file_stamp
from tailrace.security.credentials import (
    AUTHORITIES,
    CERTIFICATE,
    FOR_ETCD,
    KEY,
    Credentials,
    UnusableCredentials,
    read_credentials,
)
from tailrace.security.roles import Role

log = logging.getLogger(__name__)

# Upper bound on how late a change is noticed; files are checked only when credentials are requested.
_POLL_S: Final = 1.0

_DAY_S: Final = 86_400.0
# A certificate is reported daily in its last week, one that is valid for less than four weeks in its last
# quarter.
_WARN_S: Final = 7 * _DAY_S
_WARN_SHARE: Final = 0.25


class CredentialFolder:
    """The credentials in a folder, reloaded when its files change.

    Unusable files are ignored and the previous credentials stay in use: files may be replaced one after the
    other, and a mistake must not disconnect a running service.
    """

    def __init__(
        self,
        path: Path,
        roles: frozenset[Role],
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Load the credentials. Raise UnusableCredentials.

        `roles`: the roles that the certificate may have. `clock`: monotonic time in seconds; `wall_clock`:
        seconds since the Unix epoch.
        """
        self._path = path
        self._roles = roles
        self._clock = clock
        self._wall_clock = wall_clock
        # gRPC fetches credentials on its own threads.
        self._lock = threading.Lock()
        self._stamp = self._read_stamp()
        self._credentials = self._read()
        self._version = 0
        self._next_check_s = clock() + _POLL_S
        # Stamp of the files that failed to load, and whether that failure was logged.
        self._failed: tuple[Stamp, ...] = ()
        self._logged = False
        # When to warn of the certificate's end again, by `clock`.
        self._warn_s = clock()
        self._warn_of_end()

    @property
    def path(self) -> Path:
        """Return the folder's path."""
        return self._path

    def current(self) -> Credentials:
        """Return the latest usable credentials. Safe on any thread."""
        return self.versioned()[1]

    def versioned(self) -> tuple[int, Credentials]:
        """Return the latest usable credentials and their version, which changes when they do. Safe on any
        thread."""
        with self._lock:
            now_s = self._clock()
            if now_s >= self._next_check_s:
                self._next_check_s = now_s + _POLL_S
                self._refresh()
                self._warn_of_end()
            return self._version, self._credentials

    def _refresh(self) -> None:
        stamp = self._read_stamp()
        if stamp == self._stamp:
            return
        try:
            self._credentials = self._read()
        except UnusableCredentials as error:
            # The first failure may be a replacement in progress; log only when the same files fail again.
            if stamp != self._failed:
                self._failed, self._logged = stamp, False
            elif not self._logged:
                self._logged = True
                log.error("%s; the previous certificate stays in use", error)
            return
        self._stamp = stamp
        self._version += 1
        self._warn_s = self._clock()
        log.info("%s: new certificate, valid until %s", self._path, _day(self._credentials.end_s))

    def _warn_of_end(self) -> None:
        """Log that the certificate ends soon or has ended, once a day."""
        now_s = self._clock()
        if now_s < self._warn_s:
            return
        in_use = self._credentials
        lifetime_s, left_s = in_use.end_s - in_use.not_before_s, in_use.end_s - self._wall_clock()
        if left_s > min(_WARN_S, _WARN_SHARE * lifetime_s):
            return
        folder = self._path if in_use.end_s == in_use.not_after_s else self._path / FOR_ETCD
        certificate, end = folder / CERTIFICATE, _day(in_use.end_s)
        if left_s > 0.0:
            log.warning("%s expires in %.1f days, at %s", certificate, left_s / _DAY_S, end)
            # The next one at the latest when it has expired.
            self._warn_s = now_s + min(_DAY_S, left_s)
        else:
            log.error("%s expired at %s: new connections fail until it is replaced", certificate, end)
            self._warn_s = now_s + _DAY_S

    def _read_stamp(self) -> tuple[Stamp, ...]:
        files = (AUTHORITIES, CERTIFICATE, KEY)
        folders = (self._path, self._path / FOR_ETCD)
        return tuple(file_stamp(folder / file) for folder in folders for file in files)

    def _read(self) -> Credentials:
        credentials = read_credentials(self._path)
        if credentials.identity.role not in self._roles:
            allowed_roles = " or ".join(sorted(role.value for role in self._roles))
            raise UnusableCredentials(
                f"{self._path / CERTIFICATE}: its role is {credentials.identity.role.value}; {allowed_roles} "
                "is required here"
            )
        return credentials


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(seconds))
