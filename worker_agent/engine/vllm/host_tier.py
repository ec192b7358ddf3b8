"""Host memory as a second tier of the prefix cache: evicted blocks are kept there and loaded on demand.

Scheduler side of the connector. A block is copied to host memory when vLLM is about to reuse it. If that
happens while a step is being scheduled, the step makes the copy before it computes; between steps the copy is
made at once, because the block's new owner may write to it immediately. When vLLM admits a request, the part
of its prompt that is in host memory but not on the device counts as externally computed tokens: vLLM lets the
request wait with its blocks, and gives the blocks their names after they have been loaded and verified.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from vllm.v1.core.kv_cache_utils import KVCacheBlock, get_block_hash
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from worker_agent.engine.host_ledger import HostLedger
from worker_agent.engine.vllm.host_pool import HostPool, Load, Swap
from worker_agent.engine.vllm.kv_blocks import KvBlocks


@dataclass(frozen=True, slots=True)
class _Offer:
    """Blocks in host memory reported to vLLM for one request, from its block `first` on. Their slots are
    pinned until the load starts or the step has been scheduled."""

    first: int
    slots: list[int]
    names: list[bytes]


class HostTier:
    """Takes the place of the metrics collector of vLLM's BlockPool, which is called for each block that is
    evicted, with its name, and for each that is allocated. Engine thread only."""

    def __init__(self, ledger: HostLedger, kv: KvBlocks, pool: HostPool, block_tokens: int) -> None:
        self.loaded_blocks = 0
        self._ledger = ledger
        self._kv = kv
        self._pool = pool
        self._block_tokens = block_tokens
        # Name of the block that vLLM is evicting.
        self._evicted: bytes | None = None
        # Blocks to copy to host memory, (block, name) by slot, collected while a step is scheduled or inside
        # `saving_evictions`; None: copy each at once.
        self._saves: dict[int, tuple[int, bytes]] | None = None
        self._offers: dict[str, _Offer] = {}
        self._new_loads: list[Load] = []
        # By request.
        self._loading: dict[str, Load] = {}
        self._loading_names: set[bytes] = set()

    @property
    def busy(self) -> bool:
        """Whether any load is in progress."""
        return bool(self._loading)

    def is_loading(self, request_id: str) -> bool:
        """Whether a load for this request ID is in progress, even if the request itself has ended."""
        return request_id in self._loading

    def clear(self) -> None:
        """Discard all cached blocks, because the device's cache is being reset."""
        self._ledger.discard_all()

    # ---- vLLM's KVCacheMetricsCollector

    def on_block_evicted(self, block: KVCacheBlock) -> None:
        """Remember the block's name; vLLM calls `on_block_allocated` next if the block is being reused."""
        self._evicted = None if block.block_hash is None else bytes(get_block_hash(block.block_hash))

    def on_block_allocated(self, block: KVCacheBlock) -> None:
        """Save the block that has just been evicted, before its new owner writes to it."""
        name, self._evicted = self._evicted, None
        slot = None if name is None else self._ledger.cache(name)
        if name is None or slot is None:
            return
        if self._saves is None:
            self._save({slot: (block.block_id, name)})
        else:
            self._saves[slot] = (block.block_id, name)

    def on_block_accessed(self, block: KVCacheBlock) -> None:
        """Ignore cache hits on the device."""

    def reset(self) -> None:
        """Ignore resets of the device's cache; see `clear`."""

    # ---- between steps

    @contextmanager
    def saving_evictions(self) -> Iterator[None]:
        """Save all blocks evicted inside the context in one copy at its end; nothing may write to them
        before."""
        self._saves = {}
        try:
            yield
        finally:
            saves, self._saves = self._saves, None
            if saves:
                self._save(saves)

    def _save(self, saves: Mapping[int, tuple[int, bytes]]) -> None:
        swap = _swap_of(saves)
        self._kv.wait_for_steps()
        self._pool.save(swap.block_ids, swap.slots, swap.names)

    # ---- one step

    def begin_schedule(self) -> None:
        """Start collecting the blocks that scheduling the next step evicts."""
        self._saves = {}

    def end_schedule(self) -> tuple[list[Swap], list[Load]]:
        """Return the copies that the step makes before it computes, and the loads that it starts."""
        saves, self._saves = self._saves or {}, None
        for offer in self._offers.values():
            self._ledger.release(offer.slots)
        self._offers = {}
        new_loads, self._new_loads = self._new_loads, []
        return [_swap_of(saves)] if saves else [], new_loads

    # ---- loads

    def match(self, request: Request, computed: int) -> int | None:
        """Return how many tokens after the first `computed` host memory has, and pin their blocks.

        Return None if another request is loading the same blocks: this one will find them on the device.
        """
        self._withdraw_offer(request.request_id)
        first, part = divmod(computed, self._block_tokens)
        # The last token must always be computed.
        last = (request.num_tokens - 1) // self._block_tokens
        if part or first >= last or request.skip_reading_prefix_cache:
            return 0
        names = [bytes(name) for name in request.block_hashes[first:last]]
        if names[0] in self._loading_names:
            return None
        slots = self._ledger.find(names)
        for slot in slots:
            self._ledger.pin(slot)
        if slots:
            self._offers[request.request_id] = _Offer(first, slots, names[: len(slots)])
        return len(slots) * self._block_tokens

    def start_load(self, request: Request, block_ids: list[int]) -> None:
        """Load the offered blocks into the blocks that vLLM has allocated for the request."""
        offer = self._offers.pop(request.request_id)
        places = block_ids[offer.first : offer.first + len(offer.slots)]
        load = Load(request.request_id, Swap(places, offer.slots, offer.names))
        self._ledger.touch(offer.names)
        self._loading_names.update(offer.names)
        self._loading[request.request_id] = load
        self._new_loads.append(load)

    def complete_loads(self, output: KVConnectorOutput) -> None:
        """Release the slots of the loads that a step reports as complete, and discard corrupt blocks."""
        for request_id in output.finished_recving or ():
            load = self._loading.pop(request_id, None)
            if load is None:
                continue
            swap, bad = load.swap, output.invalid_block_ids
            corrupt = [
                name for block_id, name in zip(swap.block_ids, swap.names, strict=True) if block_id in bad
            ]
            self._ledger.discard(corrupt)
            self._ledger.release(swap.slots)
            self._loading_names.difference_update(swap.names)
            self.loaded_blocks += len(swap.names) - len(corrupt)

    def _withdraw_offer(self, request_id: str) -> None:
        offer = self._offers.pop(request_id, None)
        if offer is not None:
            self._ledger.release(offer.slots)


def _swap_of(saves: Mapping[int, tuple[int, bytes]]) -> Swap:
    block_ids, names = zip(*saves.values(), strict=True)
    return Swap(list(block_ids), list(saves), list(names))
