"""The interface to the memory that holds KV, and a pool of staging buffers for transfers."""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from worker_agent.engine.base import Staging
from worker_agent.kv.address import KvTransferError
from worker_agent.kv.transport import CHUNK_BYTES


class KvMemory(Protocol):
    """Allocates staging buffers and reads blocks of exports into them. Called from one event loop only."""

    def staging(self, num_blocks: int) -> Staging:
        """Return a contiguous buffer for `num_blocks` blocks in the memory that holds the KV."""

    def staging_over(self, memory: npt.NDArray[np.uint8]) -> Staging | None:
        """Return a buffer over this host memory, of a whole number of blocks; None if the KV is not in host
        memory."""

    async def read_blocks(
        self, request_id: str, first_block: int, num_blocks: int, out: Staging
    ) -> list[int]:
        """Copy an export's blocks into `out`; return a 64-bit checksum per block. Raise EngineRefusal."""


_KEPT_MAX: Final = 8


def require_sealable(memory: KvMemory, block_bytes: int) -> None:
    """Raise KvTransferError unless KV passes through host memory, where it can be encrypted."""
    if memory.staging_over(np.zeros(block_bytes, np.uint8)) is None:
        raise KvTransferError(
            "--encrypt-kv: KV in device memory cannot be encrypted; encrypt the link (WireGuard, IPsec) "
            "and omit the option"
        )


class StagingPool:
    """The staging buffers of one engine or rank. Buffers of a full chunk are kept; smaller ones are not."""

    def __init__(self, memory: KvMemory, block_bytes: int) -> None:
        self._memory = memory
        self.chunk_blocks = max(1, CHUNK_BYTES // block_bytes)
        self._free: list[Staging] = []

    def take(self, num_blocks: int) -> Staging:
        """Return a buffer of exactly this many blocks, at most `chunk_blocks`."""
        if num_blocks == self.chunk_blocks and self._free:
            return self._free.pop()
        return self._memory.staging(num_blocks)

    def over(self, memory: npt.NDArray[np.uint8]) -> Staging | None:
        """Return a buffer over this host memory; None if the KV is not in host memory."""
        return self._memory.staging_over(memory)

    def give_back(self, staging: Staging, num_blocks: int) -> None:
        """Return a buffer that no transfer uses any more."""
        if num_blocks == self.chunk_blocks and len(self._free) < _KEPT_MAX:
            self._free.append(staging)
