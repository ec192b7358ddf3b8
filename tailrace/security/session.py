"""A TLS session without a socket: encrypts and decrypts between a byte stream and a socket's data.

It performs no I/O and needs no event loop; every method is safe on any thread.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable
from typing import Final

from tailrace.security.credentials import uris_of
from tailrace.security.roles import Identity, identity_of

_READ_BYTES: Final = 256 * 1024


class TlsSession:
    """The TLS state of one connection. Concurrent sends are written whole, in the order of their
    encryption."""

    def __init__(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, tls: ssl.SSLObject) -> None:
        self._incoming = incoming
        self._outgoing = outgoing
        self._tls = tls
        # An SSLObject must not be used by two threads at once.
        self._lock = threading.Lock()
        self._established = False

    @classmethod
    def server(cls, context: ssl.SSLContext) -> TlsSession:
        """Create the accepting end; it requests a client certificate if the context requires one."""
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        return cls(incoming, outgoing, context.wrap_bio(incoming, outgoing, server_side=True))

    @classmethod
    def client(cls, context: ssl.SSLContext, server_name: str) -> TlsSession:
        """Create the connecting end, for a server whose certificate names `server_name`."""
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        return cls(incoming, outgoing, context.wrap_bio(incoming, outgoing, server_hostname=server_name))

    @property
    def established(self) -> bool:
        """Return whether the handshake is complete and messages may be sent."""
        return self._established

    @property
    def peer(self) -> Identity:
        """Return the peer's identity; valid once established. Raise NoIdentity."""
        return identity_of(uris_of(self._tls.getpeercert() or {}))

    def begin(self, write: Callable[[bytes], None]) -> None:
        """Write the client's first handshake message; does nothing at the accepting end."""
        self.receive(b"", write)

    def receive(self, data: bytes, write: Callable[[bytes], None]) -> tuple[bytes, bool]:
        """Decrypt bytes from the socket. Return the plaintext, and whether the peer has closed the session.

        Handshake messages and alerts go to `write`, also when this raises ssl.SSLError: the alert tells the
        peer why.
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
        """Encrypt and write. Raise ssl.SSLError and whatever `write` raises."""
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
