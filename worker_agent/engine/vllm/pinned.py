"""Blocks that another worker reads and that must not be freed meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from worker_agent.engine.errors import EngineRefusal
from worker_agent.engine.vllm.host_pool import HostSlot
from worker_agent.engine.vllm.in_use import InUse
from worker_agent.engine.vllm.kv_blocks import DeviceStaging
from worker_agent.engine.vllm.load import LoadedCore


@dataclass(slots=True)
class Pinned:
    """Blocks in order; each has an extra user. The list only grows, so any thread may read it."""

    reading: InUse
    pinned: list[KVCacheBlock | HostSlot] = field(default_factory=list)

    def read(self, core: LoadedCore, first_block: int, num_blocks: int, out: DeviceStaging) -> list[int]:
        """Copy blocks to the front of `out` and return their checksums. Any thread, inside `reading`."""
        blocks = self._blocks(first_block, num_blocks)
        sums: list[int] = []
        for on_host, group in groupby(blocks, lambda block: isinstance(block, HostSlot)):
            places = [block.slot if isinstance(block, HostSlot) else block.block_id for block in group]
            part = out.part(len(sums), len(places))
            if on_host:
                assert core.host_pool is not None
                sums += core.host_pool.read(places, part)
            else:
                sums += core.kv.gather(places, part)
        return sums

    def block_ids(self, first_block: int, num_blocks: int) -> list[int]:
        """Return block IDs on an engine whose ranks read the blocks; such an engine has no host memory. Any
        thread."""
        blocks = self._blocks(first_block, num_blocks)
        return [block.block_id for block in blocks if not isinstance(block, HostSlot)]

    def _blocks(self, first_block: int, num_blocks: int) -> list[KVCacheBlock | HostSlot]:
        blocks = self.pinned[first_block : first_block + num_blocks]
        if len(blocks) != num_blocks:
            raise EngineRefusal(f"blocks {first_block}..{first_block + num_blocks - 1} are not all pinned")
        return blocks
