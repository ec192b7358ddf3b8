"""Who holds the KV that is sent and received, and the buffers that it passes through."""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from worker_agent.engine.base import Staging
from worker_agent.kv.address import KvTransferError
from worker_agent.kv.transport import CHUNK_BYTES


class KvMemory(Protocol):
    """Buffers, and blocks of exports read into them. All calls come from one event loop."""

    def staging(self, num_blocks: int) -> Staging:
        """A contiguous buffer for so many blocks in the memory that holds the KV."""

    def staging_over(self, memory: npt.NDArray[np.uint8]) -> Staging | None:
        """The same over host memory that is given, a whole number of blocks; None: the KV is elsewhere."""

    async def read_blocks(
        self, request_id: str, first_block: int, num_blocks: int, out: Staging
    ) -> list[int]:
        """Copy an export's blocks into `out`; one 64-bit checksum a block. Raises EngineRefusal."""


_KEPT_MAX: Final = 8


def require_sealable(memory: KvMemory, block_bytes: int) -> None:
    """Raise KvTransferError unless KV passes through host memory, where it can be encrypted."""
    if memory.staging_over(np.zeros(block_bytes, np.uint8)) is None:
        raise KvTransferError(
            "--encrypt-kv: KV in device memory cannot be encrypted; encrypt the link (WireGuard, IPsec) "
            "and omit the option"
        )


class StagingPool:
    """Buffers of one engine, or rank: whole chunks are kept, smaller ones are made as they are needed."""

    def __init__(self, memory: KvMemory, block_bytes: int) -> None:
        self._memory = memory
        self.chunk_blocks = max(1, CHUNK_BYTES // block_bytes)
        self._free: list[Staging] = []

    def take(self, num_blocks: int) -> Staging:
        """A buffer of exactly this many blocks, at most `chunk_blocks`."""
        if num_blocks == self.chunk_blocks and self._free:
            return self._free.pop()
        return self._memory.staging(num_blocks)

    def over(self, memory: npt.NDArray[np.uint8]) -> Staging | None:
        """A buffer over host memory that is given; None where the KV is elsewhere."""
        return self._memory.staging_over(memory)

    def give_back(self, staging: Staging, num_blocks: int) -> None:
        """No transfer uses it any more."""
        if num_blocks == self.chunk_blocks and len(self._free) < _KEPT_MAX:
            self._free.append(staging)
