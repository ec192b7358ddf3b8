"""What the two ends of a transfer know of each other: the shape of their KV, UCX addresses, and tickets.

Source and target exchange these over the migration's gRPC stream, before any message over UCX. The interfaces
of the transport that exports, imports and prefix pulls use are here, too. An engine has one endpoint, or one
per rank: addresses and tickets are lists in rank order.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, Protocol

from tailrace.v1 import worker_pb2


class KvTransferError(Exception):
    """The transfer broke, timed out or was refused; the message says which."""


class KvIdentityError(KvTransferError):
    """Other blocks were received than those requested."""


@dataclass(frozen=True, slots=True)
class KvShape:
    """The shape of KV blocks; two engines exchange KV only if theirs are equal."""

    model_fingerprint: str
    block_tokens: int
    # Of all ranks together.
    num_layers: int
    layer_block_bytes: int
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1

    @property
    def block_bytes(self) -> int:
        """Return the size of one block over all layers and ranks, in bytes."""
        return self.num_layers * self.layer_block_bytes


def kv_layout(shape: KvShape) -> worker_pb2.KvLayout:
    """Return the shape as a message."""
    return worker_pb2.KvLayout(
        model_fingerprint=shape.model_fingerprint,
        block_tokens=shape.block_tokens,
        num_layers=shape.num_layers,
        layer_block_bytes=shape.layer_block_bytes,
        tensor_parallel_size=shape.tensor_parallel_size,
        pipeline_parallel_size=shape.pipeline_parallel_size,
    )


def layout_difference(own: KvShape, peer: worker_pb2.KvLayout) -> str:
    """Return why the two cannot exchange KV, naming the settings that differ; empty if they can."""
    if own.block_tokens != peer.block_tokens:
        return f"KV blocks of {peer.block_tokens} tokens against {own.block_tokens} (block_size)"
    for setting in ("tensor_parallel_size", "pipeline_parallel_size"):
        peer_value, own_value = getattr(peer, setting), getattr(own, setting)
        if peer_value != own_value:
            return f"{setting} {peer_value} against {own_value}"
    if own.model_fingerprint != peer.model_fingerprint:
        return "the models' KV, its format (kv_cache_dtype), its layout or the versions of vLLM differ"
    if (own.num_layers, own.layer_block_bytes) != (peer.num_layers, peer.layer_block_bytes):
        source = f"{peer.num_layers} layers of {peer.layer_block_bytes} bytes a block"
        return f"{source} against {own.num_layers} of {own.layer_block_bytes}"
    return ""


# A UCX worker address has a few dozen bytes per device.
_BYTES_MAX: Final = 64 << 10


@dataclass(frozen=True, slots=True)
class KvAddress:
    """A UCX worker address: opaque, and valid only for the same version of UCX."""

    worker: bytes
    ucx_version: str
    # Identifies kernel, PID namespace and user; empty: unknown.
    host: bytes = b""
    # Whether it requires encryption of KV that leaves its host.
    sealed: bool = False

    def message(self) -> worker_pb2.KvAddress:
        """Encode the address for gRPC."""
        digest = _digest(self.worker)
        return worker_pb2.KvAddress(
            worker=self.worker,
            ucx_version=self.ucx_version,
            digest=digest,
            host=self.host,
            sealed=self.sealed,
        )

    def shares_memory(self, other: KvAddress) -> bool:
        """Return whether the two processes are known to be able to share memory."""
        return bool(self.host) and self.host == other.host


def addresses_of(
    messages: Sequence[worker_pb2.KvAddress], own_addresses: Sequence[KvAddress]
) -> list[KvAddress]:
    """Decode the peer's addresses, one per rank; return none if it has a different number of ranks.

    Raise KvTransferError as `address_of` does.
    """
    if len(messages) != len(own_addresses):
        return []
    return [address_of(message, own) for message, own in zip(messages, own_addresses, strict=True)]


def address_of(message: worker_pb2.KvAddress, own_address: KvAddress) -> KvAddress:
    """Decode a peer's address.

    Raise KvTransferError unless it is intact and of our version of UCX: UCX aborts the process on an address
    that it cannot parse.
    """
    if not 0 < len(message.worker) <= _BYTES_MAX or message.digest != _digest(message.worker):
        raise KvTransferError("the peer sent no UCX address")
    if message.ucx_version != own_address.ucx_version:
        raise KvTransferError(f"UCX {message.ucx_version} there, {own_address.ucx_version} here")
    if message.worker[0] != own_address.worker[0]:
        raise KvTransferError("the peer's UCX address has an unknown format")
    return KvAddress(message.worker, message.ucx_version, message.host, message.sealed)


def _digest(worker: bytes) -> bytes:
    return blake2b(worker, digest_size=16).digest()


_TICKET_BYTES: Final = 32
_REQUEST, _HEADER, _DATA, _GOODBYE = range(4)


@dataclass(frozen=True, slots=True, repr=False)
class Ticket:
    """A secret shared by source and target."""

    secret: bytes

    def __post_init__(self) -> None:
        if len(self.secret) != _TICKET_BYTES:
            raise ValueError(f"a ticket has {_TICKET_BYTES} bytes, not {len(self.secret)}")

    @classmethod
    def fresh(cls) -> Ticket:
        """Create a ticket from the system's randomness."""
        return cls(secrets.token_bytes(_TICKET_BYTES))

    def request(self, number: int) -> int:
        """Return the tag of the target's request of this number."""
        return self._tag(_REQUEST, number)

    def header(self, chunk: int) -> int:
        """Return the tag of a chunk's header."""
        return self._tag(_HEADER, chunk)

    def data(self, chunk: int) -> int:
        """Return the tag of a chunk's blocks."""
        return self._tag(_DATA, chunk)

    def goodbye(self) -> int:
        """Return the tag of the source's message that the export has ended."""
        return self._tag(_GOODBYE, 0)

    def _tag(self, kind: int, number: int) -> int:
        message = struct.pack("<BQ", kind, number)
        return int.from_bytes(blake2b(message, key=self.secret, digest_size=8).digest(), "little")


class BlockSession(Protocol):
    """The readable blocks of one export: those announced to its target."""

    # The target has committed and reads no more.
    taken: bool

    @property
    def tickets(self) -> Sequence[Ticket]:
        """Return the tickets that permit reading, one per endpoint."""

    async def announce(self, first_block: int, hashes: Sequence[bytes]) -> None:
        """Allow these blocks to be read from now on. Raise KvTransferError."""

    async def quiet_s(self) -> float:
        """Return the seconds since the target's last request, or since it was allowed to read. Raise
        KvTransferError."""

    async def end(self) -> None:
        """Revoke access; when this returns nothing is being read any more."""


class BlockSource(Protocol):
    """The source's end of the transport."""

    @property
    def addresses(self) -> Sequence[KvAddress]:
        """Return the source's addresses."""

    async def open(self, request_id: str, targets: Sequence[KvAddress]) -> BlockSession:
        """Allow this target, which has as many endpoints, to read what is announced. Raise
        KvTransferError."""


class BlockTransfer(Protocol):
    """All pulls of one migration, one after the other."""

    async def pull(self, first_block: int, hashes: Sequence[bytes]) -> int:
        """Fetch blocks, verify them and write them into the import's reservation; return the bytes received.

        Raise KvTransferError, KvCorrupt or EngineRefusal; then nothing is written any more.
        """

    async def close(self) -> None:
        """End the transfer. May be called again."""


class BlockPuller(Protocol):
    """The target's end of the transport."""

    @property
    def addresses(self) -> Sequence[KvAddress]:
        """Return the addresses to which sources send blocks."""

    async def connect(
        self, request_id: str, sources: Sequence[KvAddress], tickets: Sequence[Ticket]
    ) -> BlockTransfer:
        """Begin a transfer from a source with as many endpoints. Raise KvTransferError."""
