"""The messages of a transfer: fixed-size structs, little-endian.

request   target -> source   which blocks of which export, in chunks of how many
header    source -> target   per chunk: model, layers, and hash and checksum of every block
data      source -> target   per chunk, unless its header refuses: the blocks, each layer by layer
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from worker_agent.engine.base import KvShape
from worker_agent.kv.errors import KvIdentityError, KvTransferError

_MAGIC: Final = b"TRKV"
_VERSION: Final = 1
# magic, version, padding, session, first block, blocks, blocks a chunk, padding, migration id
_REQUEST: Final = struct.Struct("<4sHHQIIII64s")
# magic, version, status, first block, blocks, first layer, layers, layer block bytes, fingerprint digest
_HEADER: Final = struct.Struct("<4sHHIIIIQ16s")
# checksum, length of the hash, hash
_BLOCK: Final = struct.Struct("<QB55s")
_HASH_MAX: Final = 55

REQUEST_BYTES: Final = _REQUEST.size

OK: Final = 0
# The session is not there: the export has ended, or the asker is not its target.
NO_SESSION: Final = 1
# The blocks could not be read.
UNREADABLE: Final = 2

_REFUSALS: Final = {NO_SESSION: "the export has ended", UNREADABLE: "the source cannot read the blocks"}


@dataclass(frozen=True, slots=True)
class BlockRequest:
    """Blocks [first_block, first_block + num_blocks) of an export."""

    session: int
    migration_id: str
    first_block: int
    num_blocks: int
    chunk_blocks: int

    def encode(self) -> bytes:
        """As it goes over the wire."""
        return _REQUEST.pack(
            _MAGIC,
            _VERSION,
            0,
            self.session,
            self.first_block,
            self.num_blocks,
            self.chunk_blocks,
            0,
            migration_digest(self.migration_id),
        )


@dataclass(frozen=True, slots=True)
class ReceivedRequest:
    """A BlockRequest as the source sees it: the migration by its digest."""

    session: int
    migration: bytes
    first_block: int
    num_blocks: int
    chunk_blocks: int


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """Identity and checksum of each block of a chunk."""

    first_block: int
    hashes: Sequence[bytes]
    checksums: Sequence[int]


def migration_digest(migration_id: str) -> bytes:
    """Migration ids are of any length."""
    return blake2b(migration_id.encode()).digest()


def decode_request(data: bytes) -> ReceivedRequest:
    """Raises KvTransferError when it is none."""
    magic, version, _, session, first, count, chunk, _, migration = _REQUEST.unpack(data)
    if magic != _MAGIC or version != _VERSION:
        raise KvTransferError("a peer that speaks another protocol")
    if not count or not chunk:
        raise KvTransferError("a request for no blocks")
    return ReceivedRequest(session, migration, first, count, chunk)


def header_bytes(num_blocks: int) -> int:
    """Size of a chunk's header."""
    return _HEADER.size + num_blocks * _BLOCK.size


def encode_header(
    shape: KvShape, first_block: int, hashes: Sequence[bytes], checksums: Sequence[int]
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
        raise KvIdentityError("KV of another model came")
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
