"""The messages of a transfer: fixed-size structs, little-endian, each with a tag of its own (`ticket.py`).

request   target -> source   hello; or blocks, one chunk of them; or goodbye
header    source -> target   to all but a goodbye: model, layers, and hash and checksum of every block
data      source -> target   behind a header of blocks: the blocks, each layer by layer; none for those that
                             are asked for in shared memory (`segments.py`), whose slots are used in turn;
                             header and data are encrypted for those that are asked for sealed (`sealing.py`)
goodbye   source -> target   the export has ended; one byte

Requests are answered in their order. At most WINDOW of them are unanswered; each end posts its receives
before the other can send what they are for.
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
# Chunks that are under way at a time: gathered, on the wire, or checked.
WINDOW: Final = 4

OK: Final = 0
# The export has ended, or its target was not told of these blocks.
ENDED: Final = 1
# The blocks could not be read.
UNREADABLE: Final = 2

_REFUSALS: Final = {ENDED: "the export has ended", UNREADABLE: "the source cannot read the blocks"}


class RequestKind(enum.IntEnum):
    """What a target wants."""

    # Whether the source is there and has the same kind of KV: answered by a header of no blocks, and the name
    # of a segment.
    HELLO = 0
    BLOCKS = 1
    # Nothing any more. Not answered.
    GOODBYE = 2
    # Blocks, into the next of the segment's WINDOW slots.
    SHARED = 3
    # Blocks, encrypted on their way.
    SEALED = 4


_KINDS: Final = frozenset(int(kind) for kind in RequestKind)


@dataclass(frozen=True, slots=True)
class Request:
    """Of kind BLOCKS, SHARED or SEALED: blocks [first_block, first_block + num_blocks)."""

    kind: RequestKind
    first_block: int = 0
    num_blocks: int = 0

    def encode(self) -> bytes:
        """As it goes over the wire."""
        return _REQUEST.pack(_MAGIC, _VERSION, self.kind, self.first_block, self.num_blocks)


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """Identity and checksum of each block of a chunk."""

    first_block: int
    hashes: Sequence[bytes]
    checksums: Sequence[int]


def decode_request(data: bytes) -> Request:
    """Raises KvTransferError when it is none."""
    magic, version, kind, first, count = _REQUEST.unpack(data)
    if magic != _MAGIC or version != _VERSION or kind not in _KINDS:
        raise KvTransferError("a peer that speaks another protocol")
    if kind in (RequestKind.BLOCKS, RequestKind.SHARED, RequestKind.SEALED) and not count:
        raise KvTransferError("a request for no blocks")
    return Request(RequestKind(kind), first, count)


def header_bytes(num_blocks: int) -> int:
    """Size of a chunk's header."""
    return _HEADER.size + num_blocks * _BLOCK.size


def encode_header(
    shape: KvShape,
    first_block: int,
    hashes: Sequence[bytes],
    checksums: Sequence[int],
) -> bytes:
    """The header of a chunk whose data follows. Raises KvTransferError for a hash that is too long."""
    if any(len(each) > _HASH_MAX for each in hashes):
        raise KvTransferError(f"a block hash of more than {_HASH_MAX} bytes")
    head = _head(shape, OK, first_block, len(hashes))
    return head + b"".join(
        _BLOCK.pack(checksum, len(name), name) for name, checksum in zip(hashes, checksums, strict=True)
    )


def encode_refusal(shape: KvShape, status: int, first_block: int, num_blocks: int) -> bytes:
    """A header, of the size expected, after which no data follows."""
    return _head(shape, status, first_block, num_blocks) + bytes(num_blocks * _BLOCK.size)


def decode_header(data: bytes, shape: KvShape, first_block: int, num_blocks: int) -> ChunkHeader:
    """Read a header and check that it names what was asked for.

    Raises KvTransferError for a refusal, KvIdentityError for anything else than these blocks of this shape.
    """
    magic, version, status, first, count, first_layer, layers, layer_bytes, digest = _HEADER.unpack_from(data)
    if magic != _MAGIC or version != _VERSION:
        raise KvTransferError("a peer that speaks another protocol")
    if status != OK:
        raise KvTransferError(_REFUSALS.get(status, f"refused with status {status}"))
    if (first, count) != (first_block, num_blocks):
        raise KvIdentityError(f"blocks {first}+{count} came, {first_block}+{num_blocks} were asked for")
    if (first_layer, layers, layer_bytes) != (0, shape.num_layers, shape.layer_block_bytes):
        raise KvIdentityError(f"layers {first_layer}+{layers} of {layer_bytes} bytes a block came")
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
