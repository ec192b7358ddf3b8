"""UCX addresses of workers, the shape of their KV blocks, and the errors of transfers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

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
