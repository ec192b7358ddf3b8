"""Encryption of KV in transit (`--encrypt-kv`): AES-256-GCM with a key derived from the ticket.

The holder of the ticket can read the KV, as without encryption; the ticket itself is sent over TLS. Headers,
which name blocks, and the blocks are sealed; requests, which contain only block numbers, and memory shared
between processes of a host are not. A ticket is used once and its messages are numbered, so that no nonce is
used twice with a key.
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import Final

import numpy as np
import numpy.typing as npt
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from worker_agent.engine.base import Staging
from worker_agent.kv.address import KvTransferError
from worker_agent.kv.ticket import Ticket

TAG_BYTES: Final = 16
"""Length of the authentication tag: a sealed message is this much longer."""

_NONCE: Final = struct.Struct("<IQ")
_HEADER, _DATA = range(2)

Bytes = npt.NDArray[np.uint8]


class Seal:
    """Encrypt the messages of one transfer at the source, and decrypt them at the target."""

    def __init__(self, ticket: Ticket) -> None:
        key = blake2b(key=ticket.secret, digest_size=32, person=b"tailrace KV seal")
        self._cipher = AESGCM(key.digest())

    def seal_header(self, chunk: int, header: bytes) -> bytes:
        """Encrypt a chunk's header; the result is TAG_BYTES longer. Call it at most once per chunk."""
        return self._cipher.encrypt(_NONCE.pack(_HEADER, chunk), header, None)

    def open_header(self, chunk: int, sealed: bytes) -> bytes:
        """Decrypt a chunk's header. Raise KvTransferError if it was modified."""
        try:
            return self._cipher.decrypt(_NONCE.pack(_HEADER, chunk), sealed, None)
        except InvalidTag as error:
            raise _damaged(chunk) from error

    def seal_data(self, chunk: int, data: Bytes) -> Bytes:
        """Encrypt a chunk's blocks; the result is TAG_BYTES longer. Call it at most once per chunk.

        This takes milliseconds.
        """
        sealed = np.empty(data.size + TAG_BYTES, np.uint8)
        self._cipher.encrypt_into(_NONCE.pack(_DATA, chunk), data.data, None, sealed.data)
        return sealed

    def open_data(self, chunk: int, sealed: Bytes, out: Bytes) -> None:
        """Decrypt a chunk's blocks into `out`, which is TAG_BYTES shorter. Raise KvTransferError if they were
        modified."""
        try:
            self._cipher.decrypt_into(_NONCE.pack(_DATA, chunk), sealed.data, None, out.data)
        except InvalidTag as error:
            raise _damaged(chunk) from error


def host_bytes(staging: Staging) -> Bytes:
    """Return a view of a host buffer as bytes."""
    return np.frombuffer(staging.buffer, np.uint8)  # type: ignore[call-overload, no-any-return]


def _damaged(chunk: int) -> KvTransferError:
    return KvTransferError(f"chunk {chunk} was modified in transit, or is sealed with another key")
