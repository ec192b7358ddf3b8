"""One rank's part of the KV, as its transport sees it: which of its blocks are exported, and what has come
that has no place yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from worker_agent.engine.base import Staging
from worker_agent.engine.errors import EngineRefusal
from worker_agent.engine.vllm.kv_blocks import DeviceStaging, KvBlocks


class RankMemory:
    """KvMemory of a rank. All but `settle` on the event loop of the rank's transfers."""

    def __init__(self, kv: KvBlocks) -> None:
        self._kv = kv
        # Blocks of each export, by the name of its session; the engine has them pinned.
        self._exported: dict[str, list[int]] = {}
        # What came beyond the places that were known, of each request on its way in: (first block, bytes).
        self._later: dict[str, list[tuple[int, DeviceStaging]]] = {}

    # ---- source

    def export(self, name: str, first_block: int, block_ids: Sequence[int]) -> None:
        """These are its blocks from number `first_block` on."""
        self._exported.setdefault(name, [])[first_block:] = block_ids

    def forget(self, name: str) -> None:
        """Nothing of this export is read any more."""
        self._exported.pop(name, None)

    def staging(self, num_blocks: int) -> Staging:
        """KvMemory.staging."""
        return self._kv.staging(num_blocks)

    def staging_over(self, memory: npt.NDArray[np.uint8]) -> Staging | None:
        """KvMemory.staging_over."""
        return self._kv.staging_over(memory)

    async def read_blocks(
        self, request_id: str, first_block: int, num_blocks: int, out: Staging
    ) -> list[int]:
        """KvMemory.read_blocks; `request_id` is the session's name."""
        assert isinstance(out, DeviceStaging)
        block_ids = self._exported.get(request_id, [])[first_block : first_block + num_blocks]
        if len(block_ids) != num_blocks:
            raise EngineRefusal(f"blocks {first_block}..{first_block + num_blocks - 1} are not all exported")
        return await asyncio.to_thread(self._kv.gather, block_ids, out)

    # ---- target

    def expect(self, request_id: str) -> None:
        """A transfer of this request begins."""
        self._later[request_id] = []

    def leave(self, request_id: str) -> None:
        """It is over."""
        self._later.pop(request_id, None)

    async def write(
        self,
        request_id: str,
        first_block: int,
        block_ids: Sequence[int],
        received: Staging,
        checksums: Sequence[int],
    ) -> None:
        """Check received blocks and copy them to their places; keep those beyond.

        Raises KvCorrupt, having written nothing.
        """
        assert isinstance(received, DeviceStaging)
        later = self._later.get(request_id)

        def copy() -> None:
            self._kv.verify(received, checksums, first_block)
            placed, came = len(block_ids), len(checksums)
            if placed:
                self._kv.scatter(received, block_ids)
            if placed < came and later is not None:
                later.append((first_block + placed, received.part(placed, came - placed).copy()))

        await asyncio.to_thread(copy)

    def settle(self, request_id: str, block_ids: Sequence[int]) -> None:
        """Give what was kept its places: `block_ids` are those of all the request's blocks. The rank's own
        thread, between two steps, once everything has come."""
        for first, staging in self._later.pop(request_id, []):
            self._kv.scatter(staging, block_ids[first : first + len(staging.bytes)])
