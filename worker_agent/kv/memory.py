"""What the transport needs of whoever holds the KV: an engine of one device, or one rank of several."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from worker_agent.engine.base import Staging


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
