"""The messages of a transfer: fixed-size structs, little-endian, each with its own tag (`Ticket`).

request   target -> source   hello, one chunk of blocks, or goodbye
header    source -> target   reply to hello and blocks: model, layers, and hash and checksum of every block
data      source -> target   after a header of blocks: the blocks, each layer by layer. None for kind SHARED:
                             the blocks are in the next slot of the shared memory (`memory.py`). For kind
                             SEALED, header and data are encrypted (`Seal`)
goodbye   source -> target   the export has ended; one byte

Requests are answered in order. At most WINDOW of them are unanswered; each end posts its receives before the
other end can send the corresponding messages.

Encryption (`--encrypt-kv`) is AES-256-GCM with a key derived from the ticket. The holder of the ticket can
read the KV, as without encryption; the ticket itself is sent over TLS. Headers, which name blocks, and the
blocks are sealed; requests, which contain only block numbers, and memory shared between processes of a host
are not. A ticket is used once and its messages are numbered, so that no nonce is used twice with a key.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

import numpy as np
import numpy.typing as npt
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from worker_agent.engine.base import KvShape, Staging
from worker_agent.kv.address import KvIdentityError, KvTransferError, Ticket

_MAGIC: Final = b"TRKV"
_VERSION: Final = 2
# magic, version, kind, first block, blocks
_REQUEST: Final = struct.Struct("<4sHHII")
# magic, version, status, first block, blocks, first layer, layers, layer block bytes, fingerprint digest
_HEADER: Final = struct.Struct("<4sHHIIIIQ16s")
# checksum, length of the hash, hash
_BLOCK: Final = struct.Struct("<QB55s")
_HASH_MAX: Final = 55

REQUEST_BYTES: Final = _REQUEST.size
# Maximum chunks in flight: being gathered, sent, or verified.
WINDOW: Final = 4

OK: Final = 0
# The export has ended, or these blocks were not announced to the target.
ENDED: Final = 1
# The blocks could not be read.
UNREADABLE: Final = 2

_REFUSALS: Final = {ENDED: "the export has ended", UNREADABLE: "the source cannot read the blocks"}


class RequestKind(enum.IntEnum):
    """The kind of a target's request."""

    # Answered by a header without blocks, which identifies the model, and the name of a segment.
    HELLO = 0
    BLOCKS = 1
    # The target needs nothing more. Not answered.
    GOODBYE = 2
    # Blocks, to be written to the next of the segment's WINDOW slots.
    SHARED = 3
    # Blocks, to be sent encrypted.
    SEALED = 4


_KINDS: Final = frozenset(int(kind) for kind in RequestKind)


@dataclass(frozen=True, slots=True)
class Request:
    """A request; for kinds BLOCKS, SHARED and SEALED of blocks [first_block, first_block + num_blocks)."""

    kind: RequestKind
    first_block: int = 0
    num_blocks: int = 0

    def encode(self) -> bytes:
        """Encode the request for the wire."""
        return _REQUEST.pack(_MAGIC, _VERSION, self.kind, self.first_block, self.num_blocks)


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """The identity and checksum of each block of a chunk."""

    first_block: int
    hashes: Sequence[bytes]
    checksums: Sequence[int]


def decode_request(data: bytes) -> Request:
    """Decode a request. Raise KvTransferError if it is malformed."""
    magic, version, kind, first, count = _REQUEST.unpack(data)
    if magic != _MAGIC or version != _VERSION or kind not in _KINDS:
        raise KvTransferError("the peer speaks another protocol")
    if kind in (RequestKind.BLOCKS, RequestKind.SHARED, RequestKind.SEALED) and not count:
        raise KvTransferError("a request for no blocks")
    return Request(RequestKind(kind), first, count)


def header_bytes(num_blocks: int) -> int:
    """Return the size of a chunk's header in bytes."""
    return _HEADER.size + num_blocks * _BLOCK.size


def encode_header(
    shape: KvShape,
    first_block: int,
    hashes: Sequence[bytes],
    checksums: Sequence[int],
) -> bytes:
    """Encode the header of a chunk whose data follows. Raise KvTransferError for a hash that is too long."""
    if any(len(block_hash) > _HASH_MAX for block_hash in hashes):
        raise KvTransferError(f"a block hash of more than {_HASH_MAX} bytes")
    head = _head(shape, OK, first_block, len(hashes))
    return head + b"".join(
        _BLOCK.pack(checksum, len(name), name) for name, checksum in zip(hashes, checksums, strict=True)
    )


def encode_refusal(shape: KvShape, status: int, first_block: int, num_blocks: int) -> bytes:
    """Encode a header of the expected size after which no data follows."""
    return _head(shape, status, first_block, num_blocks) + bytes(num_blocks * _BLOCK.size)


def decode_header(data: bytes, shape: KvShape, first_block: int, num_blocks: int) -> ChunkHeader:
    """Decode a header and check that it has the requested blocks.

    Raise KvTransferError for a refusal, KvIdentityError for other blocks or another shape.
    """
    magic, version, status, first, count, first_layer, layers, layer_bytes, digest = _HEADER.unpack_from(data)
    if magic != _MAGIC or version != _VERSION:
        raise KvTransferError("the peer speaks another protocol")
    if status != OK:
        raise KvTransferError(_REFUSALS.get(status, f"refused with status {status}"))
    if (first, count) != (first_block, num_blocks):
        raise KvIdentityError(f"received blocks {first}+{count}, requested {first_block}+{num_blocks}")
    if (first_layer, layers, layer_bytes) != (0, shape.num_layers, shape.layer_block_bytes):
        raise KvIdentityError(f"received layers {first_layer}+{layers} of {layer_bytes} bytes per block")
    if digest != _fingerprint_digest(shape):
        raise KvIdentityError("received KV of another model")
    hashes: list[bytes] = []
    checksums: list[int] = []
    for checksum, length, name in _BLOCK.iter_unpack(data[_HEADER.size :]):
        checksums.append(checksum)
        hashes.append(name[:length])
    return ChunkHeader(first, hashes, checksums)


def _head(shape: KvShape, status: int, first_block: int, num_blocks: int) -> bytes:
    return _HEADER.pack(
        _MAGIC,
        _VERSION,
        status,
        first_block,
        num_blocks,
        0,
        shape.num_layers,
        shape.layer_block_bytes,
        _fingerprint_digest(shape),
    )


def _fingerprint_digest(shape: KvShape) -> bytes:
    return blake2b(shape.model_fingerprint.encode(), digest_size=16).digest()


TAG_BYTES: Final = 16
"""Length of the authentication tag: a sealed message is this much longer."""

_NONCE: Final = struct.Struct("<IQ")
_SEALED_HEADER, _SEALED_DATA = range(2)

Bytes = npt.NDArray[np.uint8]


class Seal:
    """Encrypt the messages of one transfer at the source, and decrypt them at the target."""

    def __init__(self, ticket: Ticket) -> None:
        key = blake2b(key=ticket.secret, digest_size=32, person=b"tailrace KV seal")
        self._cipher = AESGCM(key.digest())

    def seal_header(self, chunk: int, header: bytes) -> bytes:
        """Encrypt a chunk's header; the result is TAG_BYTES longer. Call it at most once per chunk."""
        return self._cipher.encrypt(_NONCE.pack(_SEALED_HEADER, chunk), header, None)

    def open_header(self, chunk: int, sealed: bytes) -> bytes:
        """Decrypt a chunk's header. Raise KvTransferError if it was modified."""
        try:
            return self._cipher.decrypt(_NONCE.pack(_SEALED_HEADER, chunk), sealed, None)
        except InvalidTag as error:
            raise _damaged(chunk) from error

    def seal_data(self, chunk: int, data: Bytes) -> Bytes:
        """Encrypt a chunk's blocks; the result is TAG_BYTES longer. Call it at most once per chunk.

        This takes milliseconds.
        """
        sealed = np.empty(data.size + TAG_BYTES, np.uint8)
        self._cipher.encrypt_into(_NONCE.pack(_SEALED_DATA, chunk), data.data, None, sealed.data)
        return sealed

    def open_data(self, chunk: int, sealed: Bytes, out: Bytes) -> None:
        """Decrypt a chunk's blocks into `out`, which is TAG_BYTES shorter. Raise KvTransferError if they were
        modified."""
        try:
            self._cipher.decrypt_into(_NONCE.pack(_SEALED_DATA, chunk), sealed.data, None, out.data)
        except InvalidTag as error:
            raise _damaged(chunk) from error


def host_bytes(staging: Staging) -> Bytes:
    """Return a view of a host buffer as bytes."""
    return np.frombuffer(staging.buffer, np.uint8)  # type: ignore[call-overload, no-any-return]


def _damaged(chunk: int) -> KvTransferError:
    return KvTransferError(f"chunk {chunk} was modified in transit, or is sealed with another key")
