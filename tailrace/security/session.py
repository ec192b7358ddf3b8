"""TLS between a stream's bytes and a socket's: no socket, no event loop, any thread."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable
from typing import Final

from tailrace.security.credentials import uris_of
from tailrace.security.roles import Identity, identity_of

_READ_BYTES: Final = 256 * 1024


class TlsSession:
    """One connection's. What is written from several threads goes out whole and in the order of sealing."""

    def __init__(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, tls: ssl.SSLObject) -> None:
        self._incoming = incoming
        self._outgoing = outgoing
        self._tls = tls
        # An SSL object is for one thread at a time.
        self._lock = threading.Lock()
        self._established = False

    @classmethod
    def server(cls, context: ssl.SSLContext) -> TlsSession:
        """The accepting end; it asks for a certificate if the context says so."""
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        return cls(incoming, outgoing, context.wrap_bio(incoming, outgoing, server_side=True))

    @classmethod
    def client(cls, context: ssl.SSLContext, server_name: str) -> TlsSession:
        """The connecting end, to a server that has `server_name` in its certificate."""
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        return cls(incoming, outgoing, context.wrap_bio(incoming, outgoing, server_hostname=server_name))

    @property
    def established(self) -> bool:
        """Whether the other end has proved itself, and messages may be sent."""
        return self._established

    @property
    def peer(self) -> Identity:
        """Who is at the other end, once established. Raises NoIdentity."""
        return identity_of(uris_of(self._tls.getpeercert() or {}))

    def begin(self, write: Callable[[bytes], None]) -> None:
        """Say what the connecting end says first; nothing at the accepting end."""
        self.receive(b"", write)

    def receive(self, data: bytes, write: Callable[[bytes], None]) -> tuple[bytes, bool]:
        """Take bytes from the socket; give the stream's, and whether the other end has closed.

        What the protocol itself has to say goes to `write`, also when this raises ssl.SSLError: an alert then
        tells the other end why.
        """
        with self._lock:
            self._incoming.write(data)
            try:
                if not self._established:
                    try:
                        self._tls.do_handshake()
                    except ssl.SSLWantReadError:
                        return b"", False
                    self._established = True
                return self._read()
            finally:
                if self._outgoing.pending:
                    write(self._outgoing.read())

    def send(self, data: bytes, write: Callable[[bytes], None]) -> None:
        """Seal and write. Raises ssl.SSLError, and what `write` raises."""
        with self._lock:
            self._tls.write(data)
            write(self._outgoing.read())

    def _read(self) -> tuple[bytes, bool]:
        parts: list[bytes] = []
        closed = False
        try:
            while part := self._tls.read(_READ_BYTES):
                parts.append(part)
            closed = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            closed = True
        return (parts[0] if len(parts) == 1 else b"".join(parts)), closed
