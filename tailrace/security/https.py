"""A server's certificate for users, which is read again when its files change."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tailrace.files import Stamp, file_stamp
from tailrace.security.credentials import load_chain

log = logging.getLogger(__name__)

_POLL_S: Final = 1.0


class UnusableCertificate(Exception):
    """The files hold no certificate with its key; the message says why."""


class Https:
    """A server's TLS: new connections get the certificate that the files hold."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """Load the certificate chain and its key. Raise UnusableCertificate."""
        self._files = certificate, key
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._stamp = self._read_stamp()
        # The last usable content of the files, for a server that does not use `context`.
        self.chain, self.key = self._load()
        # Why the files are unusable; empty if they are not.
        self._problem = ""

    async def follow(self, on_read: Callable[[], None] = lambda: None) -> None:
        """Read the files again when they have changed, and call `on_read` after each look, until cancelled.
        Raise what it raises."""
        while True:
            await asyncio.sleep(_POLL_S)
            await asyncio.to_thread(self.refresh)
            on_read()

    def refresh(self) -> None:
        """Read the files again if they have changed. Unusable ones change nothing."""
        stamp = self._read_stamp()
        if stamp == self._stamp and not self._problem:
            return
        try:
            self.chain, self.key = self._load()
        except UnusableCertificate as error:
            # Files may be replaced one after the other, and a read may fail once: it is tried again.
            if str(error) != self._problem:
                log.error("%s; the previous certificate stays in use", error)
            self._problem = str(error)
            return
        self._stamp, self._problem = stamp, ""
        log.info("%s: new certificate", self._files[0])

    def _load(self) -> tuple[bytes, bytes]:
        certificate, key = self._files
        try:
            content = certificate.read_bytes(), key.read_bytes()
            # Apart at first: what is unusable must not be in use by half.
            for context in (ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), self.context):
                load_chain(context, *content)
        except (OSError, ValueError) as error:
            raise UnusableCertificate(f"{certificate} with {key}: {error}") from error
        return content

    def _read_stamp(self) -> tuple[Stamp, ...]:
        return tuple(map(file_stamp, self._files))
