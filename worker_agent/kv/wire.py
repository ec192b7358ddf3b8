"""The messages of a transfer: fixed-size structs, little-endian, each with its own tag (`ticket.py`).

request   target -> source   hello, one chunk of blocks, or goodbye
header    source -> target   reply to hello and blocks: model, layers, and hash and checksum of every block
data      source -> target   after a header of blocks: the blocks, each layer by layer. None for kind SHARED:
                             the blocks are in the next slot of the shared memory (`segments.py`). For kind
                             SEALED, header and data are encrypted (`sealing.py`)
goodbye   source -> target   the export has ended; one byte

Requests are answered in order. At most WINDOW of them are unanswered; each end posts its receives before the
other end can send the corresponding messages.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from worker_agent.engine.base import KvShape
from worker_agent.kv.address import KvIdentityError, KvTransferError

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
