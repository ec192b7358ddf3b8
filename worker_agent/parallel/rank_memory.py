"""One rank's KV as its transport sees it: its exported blocks, and received blocks that have no place yet."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from worker_agent.engine.base import Staging
from worker_agent.engine.errors import EngineRefusal
from worker_agent.engine.vllm.kv_blocks import DeviceStaging, KvBlocks


class RankMemory:
    """The KvMemory of a rank. Everything but `settle` runs on the event loop of the rank's agent."""

    def __init__(self, kv: KvBlocks) -> None:
        self._kv = kv
        # Blocks of each export, by the name of its session; the engine has them pinned.
        self._exported: dict[str, list[int]] = {}
        # Blocks received before they had a place, by request: (first block, bytes).
        self._unplaced: dict[str, list[tuple[int, DeviceStaging]]] = {}

    # ---- source

    def export(self, name: str, first_block: int, block_ids: Sequence[int]) -> None:
        """Record where the export's blocks are, from number `first_block` on."""
        self._exported.setdefault(name, [])[first_block:] = block_ids

    def forget(self, name: str) -> None:
        """Remove an export that is no longer read."""
        self._exported.pop(name, None)

    def staging(self, num_blocks: int) -> Staging:
        """See KvMemory.staging."""
        return self._kv.staging(num_blocks)

    def staging_over(self, memory: npt.NDArray[np.uint8]) -> Staging | None:
        """See KvMemory.staging_over."""
        return self._kv.staging_over(memory)

    async def read_blocks(
        self, request_id: str, first_block: int, num_blocks: int, out: Staging
    ) -> list[int]:
        """See KvMemory.read_blocks; `request_id` is the session's name."""
        assert isinstance(out, DeviceStaging)
        block_ids = self._exported.get(request_id, [])[first_block : first_block + num_blocks]
        if len(block_ids) != num_blocks:
            raise EngineRefusal(f"blocks {first_block}..{first_block + num_blocks - 1} are not all exported")
        return await asyncio.to_thread(self._kv.gather, block_ids, out)

    # ---- target

    def expect(self, request_id: str) -> None:
        """Prepare to receive blocks of the request."""
        self._unplaced[request_id] = []

    def leave(self, request_id: str) -> None:
        """Drop what was received for the request and has no place."""
        self._unplaced.pop(request_id, None)

    async def write(
        self,
        request_id: str,
        first_block: int,
        block_ids: Sequence[int],
        received: Staging,
        checksums: Sequence[int],
    ) -> None:
        """Verify received blocks and copy them to `block_ids`; keep those beyond for `settle`.

        Raise KvCorrupt before anything is written.
        """
        assert isinstance(received, DeviceStaging)
        unplaced = self._unplaced.get(request_id)

        def copy() -> None:
            self._kv.verify(received, checksums, first_block)
            placed, num_received = len(block_ids), len(checksums)
            if placed:
                self._kv.scatter(received, block_ids)
            if placed < num_received and unplaced is not None:
                unplaced.append((first_block + placed, received.part(placed, num_received - placed).copy()))

        await asyncio.to_thread(copy)

    def settle(self, request_id: str, block_ids: Sequence[int]) -> None:
        """Copy the kept blocks to their places.

        `block_ids`: the places of all the request's blocks. Runs on the rank's own thread between two steps,
        once everything has been received.
        """
        for first, staging in self._unplaced.pop(request_id, []):
            self._kv.scatter(staging, block_ids[first : first + len(staging.bytes)])
