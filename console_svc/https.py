"""The console's certificate for browsers, which is loaded again when its files change."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

_POLL_S: Final = 1.0

_Stamp = tuple[tuple[int, int, int], ...]


class UnusableCertificate(Exception):
    """The files hold no certificate with its key; the message says why."""


class Https:
    """A server's TLS: new connections get the certificate that the files hold."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """Load the certificate chain and its key. Raise UnusableCertificate."""
        self._files = certificate, key
        self._stamp = self._read_stamp()
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._load(self.context)

    async def follow(self) -> None:
        """Load the files again when they have changed, until cancelled. Unusable ones change nothing."""
        while True:
            await asyncio.sleep(_POLL_S)
            await asyncio.to_thread(self._refresh)

    def _refresh(self) -> None:
        stamp = self._read_stamp()
        if stamp == self._stamp:
            return
        # Files may be replaced one after the other: what is unusable is tried again after the next change.
        self._stamp = stamp
        try:
            self._load(ssl.create_default_context(ssl.Purpose.CLIENT_AUTH))
            self._load(self.context)
        except UnusableCertificate as error:
            log.error("%s; the previous certificate stays in use", error)
            return
        log.info("%s: new certificate", self._files[0])

    def _load(self, context: ssl.SSLContext) -> None:
        certificate, key = self._files
        try:
            # Never ask for a password.
            context.load_cert_chain(certificate, key, password="")
        except (OSError, ValueError) as error:
            raise UnusableCertificate(f"{certificate} with {key}: {error}") from error

    def _read_stamp(self) -> _Stamp:
        stamps = []
        for file in self._files:
            try:
                status = file.stat()
            except OSError:
                stamps.append((0, 0, 0))
            else:
                stamps.append((status.st_mtime_ns, status.st_ino, status.st_size))
        return tuple(stamps)
