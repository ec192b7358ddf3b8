"""KV that is encrypted on its way (`--encrypt-kv`): AES-256-GCM, with a key that the ticket stands for.

Who holds the ticket can read, as without encryption; it travels inside TLS. What is sealed are headers, which
name blocks, and the blocks themselves; requests say no more than block numbers. In memory that two processes
of a host share nothing is sealed. A ticket serves once and numbers its messages, so that no nonce is used
twice with a key.
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
"""By which a sealed message is longer."""

_NONCE: Final = struct.Struct("<IQ")
_HEADER, _DATA = range(2)

Bytes = npt.NDArray[np.uint8]


class Seal:
    """Seals what the source of one transfer sends, and opens it at the target."""

    def __init__(self, ticket: Ticket) -> None:
        key = blake2b(key=ticket.secret, digest_size=32, person=b"tailrace KV seal")
        self._cipher = AESGCM(key.digest())

    def seal_header(self, chunk: int, header: bytes) -> bytes:
        """The header of the chunk of this number, TAG_BYTES longer. At most once for a number."""
        return self._cipher.encrypt(_NONCE.pack(_HEADER, chunk), header, None)

    def open_header(self, chunk: int, sealed: bytes) -> bytes:
        """The header again. Raises KvTransferError if it is not what was sealed."""
        try:
            return self._cipher.decrypt(_NONCE.pack(_HEADER, chunk), sealed, None)
        except InvalidTag as error:
            raise _damaged(chunk) from error

    def seal_data(self, chunk: int, data: Bytes) -> Bytes:
        """A chunk's blocks, TAG_BYTES longer. At most once for a number. Takes milliseconds."""
        sealed = np.empty(data.size + TAG_BYTES, np.uint8)
        self._cipher.encrypt_into(_NONCE.pack(_DATA, chunk), data.data, None, sealed.data)
        return sealed

    def open_data(self, chunk: int, sealed: Bytes, out: Bytes) -> None:
        """Write the blocks to `out`, which is TAG_BYTES shorter. Raises KvTransferError as `open_header`."""
        try:
            self._cipher.decrypt_into(_NONCE.pack(_DATA, chunk), sealed.data, None, out.data)
        except InvalidTag as error:
            raise _damaged(chunk) from error


def host_bytes(staging: Staging) -> Bytes:
    """A buffer of host memory as bytes, in place."""
    return np.frombuffer(staging.buffer, np.uint8)  # type: ignore[call-overload, no-any-return]


def _damaged(chunk: int) -> KvTransferError:
    return KvTransferError(f"chunk {chunk} was modified in transit, or is sealed with another key")
