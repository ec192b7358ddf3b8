"""Where a worker's UCX can be reached, the shape of what it sends, and how a transfer fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from tailrace.v1 import worker_pb2


class KvTransferError(Exception):
    """The transfer broke, took too long or was refused; the message says which."""


class KvIdentityError(KvTransferError):
    """Other blocks came than those that were asked for."""


@dataclass(frozen=True, slots=True)
class KvShape:
    """Shape of a block's KV; two engines exchange KV only if theirs are equal."""

    model_fingerprint: str
    block_tokens: int
    # Of all ranks together.
    num_layers: int
    layer_block_bytes: int
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers and ranks."""
        return self.num_layers * self.layer_block_bytes


# A worker address grows with the devices: some tens of bytes each.
_BYTES_MAX: Final = 64 << 10


@dataclass(frozen=True, slots=True)
class KvAddress:
    """A UCX worker address: opaque, and understood by the same version of UCX only."""

    worker: bytes
    ucx_version: str
    # Names kernel, PID namespace and user; empty: not known.
    host: bytes = b""
    # Beyond its host it sends and takes encrypted KV alone.
    sealed: bool = False

    def message(self) -> worker_pb2.KvAddress:
        """As it goes over gRPC."""
        digest = _digest(self.worker)
        return worker_pb2.KvAddress(
            worker=self.worker,
            ucx_version=self.ucx_version,
            digest=digest,
            host=self.host,
            sealed=self.sealed,
        )

    def shares_memory(self, other: KvAddress) -> bool:
        """Whether these two processes can, as far as can be told."""
        return bool(self.host) and self.host == other.host


def addresses_of(messages: Sequence[worker_pb2.KvAddress], ours: Sequence[KvAddress]) -> list[KvAddress]:
    """The other end's endpoints, each beside ours of the same rank; none where it has not as many.

    Raises KvTransferError as address_of does.
    """
    if len(messages) != len(ours):
        return []
    return [address_of(message, own) for message, own in zip(messages, ours, strict=True)]


def address_of(message: worker_pb2.KvAddress, ours: KvAddress) -> KvAddress:
    """The other end's address.

    Raises KvTransferError unless it is whole and of our UCX's version: UCX ends the process over bytes that
    it does not understand.
    """
    if not 0 < len(message.worker) <= _BYTES_MAX or message.digest != _digest(message.worker):
        raise KvTransferError("the peer sent no UCX address")
    if message.ucx_version != ours.ucx_version:
        raise KvTransferError(f"UCX {message.ucx_version} there, {ours.ucx_version} here")
    if message.worker[0] != ours.worker[0]:
        raise KvTransferError("the peer's UCX address has an unknown format")
    return KvAddress(message.worker, message.ucx_version, message.host, message.sealed)


def _digest(worker: bytes) -> bytes:
    return blake2b(worker, digest_size=16).digest()
