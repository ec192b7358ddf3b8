"""Prefixes in host memory: blocks that the device's cache evicts are kept there, and come back on demand.

The scheduler's side. A block is copied out when it is about to be used for something else: inside a step's
schedule it is told to that step, which copies before it computes; between two steps it is copied at once,
since whoever has the block may write to it. When vLLM admits a request, what host memory has of its prompt
beyond the device's share counts as KV that comes from elsewhere: vLLM has the request wait, holding its
blocks, and names them once they have come and were found to be whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from vllm.v1.core.kv_cache_utils import KVCacheBlock, get_block_hash
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from worker_agent.engine.host_ledger import HostLedger
from worker_agent.engine.vllm.host_pool import HostPool
from worker_agent.engine.vllm.kv_blocks import KvBlocks
from worker_agent.engine.vllm.swaps import Load, Swap


@dataclass(frozen=True, slots=True)
class _Offer:
    """What one request is told that host memory has, from its block `first` on; pinned until it is taken, or
    the step's schedule is over."""

    first: int
    slots: list[int]
    names: list[bytes]


class HostTier:
    """Engine thread only. Stands where vLLM's BlockPool has its metrics collector, which is told of each
    block that is evicted, with its name, and of each that is given out."""

    def __init__(self, ledger: HostLedger, kv: KvBlocks, pool: HostPool, block_tokens: int) -> None:
        self.loaded_blocks = 0
        self._ledger = ledger
        self._kv = kv
        self._pool = pool
        self._block_tokens = block_tokens
        # Name of the block that is just being evicted.
        self._evicted: bytes | None = None
        # What is evicted while a step is being scheduled, or blocks are taken between steps: (block, name) by
        # slot. None: neither is.
        self._saves: dict[int, tuple[int, bytes]] | None = None
        self._offers: dict[str, _Offer] = {}
        self._starting: list[Load] = []
        # By request.
        self._loading: dict[str, Load] = {}
        # Names of blocks that some request waits for.
        self._coming: set[bytes] = set()

    @property
    def busy(self) -> bool:
        """Whether anything is on its way to the device."""
        return bool(self._loading)

    def loading(self, request_id: str) -> bool:
        """Whether it is for a request of this id, which may be gone."""
        return request_id in self._loading

    def forget_all(self) -> None:
        """The device's cache is reset: whatever is kept is no longer worth anything."""
        self._ledger.forget_all()

    # ---- vLLM's KVCacheMetricsCollector

    def on_block_evicted(self, block: KVCacheBlock) -> None:
        """It loses its name, if it has one: because it is given out, which is told next, or for good."""
        self._evicted = None if block.block_hash is None else bytes(get_block_hash(block.block_hash))

    def on_block_allocated(self, block: KVCacheBlock) -> None:
        """It is given out, to be written to."""
        name, self._evicted = self._evicted, None
        slot = None if name is None else self._ledger.keep(name)
        if name is None or slot is None:
            return
        if self._saves is None:
            self._save({slot: (block.block_id, name)})
        else:
            self._saves[slot] = (block.block_id, name)

    def on_block_accessed(self, block: KVCacheBlock) -> None:
        """It has one user more."""

    def reset(self) -> None:
        """The device's cache is empty."""

    # ---- between steps

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Blocks are taken inside that somebody will write to: what they hold is copied by its end."""
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

    def step_begins(self) -> None:
        """Its schedule, in which blocks are evicted and offers made."""
        self._saves = {}

    def step_scheduled(self) -> tuple[list[Swap], list[Load]]:
        """What it copies out before it computes, and what begins to come back."""
        saves, self._saves = self._saves or {}, None
        for offer in self._offers.values():
            self._ledger.give_back(offer.slots)
        self._offers = {}
        starting, self._starting = self._starting, []
        return [_swap_of(saves)] if saves else [], starting

    # ---- what comes back

    def match(self, request: Request, computed: int) -> int | None:
        """Tokens after the first `computed` that host memory has; None: another request waits for the same
        blocks, and this one will find them."""
        self._withdraw(request.request_id)
        first, part = divmod(computed, self._block_tokens)
        # The last token is computed, whatever is here.
        last = (request.num_tokens - 1) // self._block_tokens
        if part or first >= last or request.skip_reading_prefix_cache:
            return 0
        names = [bytes(name) for name in request.block_hashes[first:last]]
        if names[0] in self._coming:
            return None
        slots = self._ledger.find(names)
        for slot in slots:
            self._ledger.pin(slot)
        if slots:
            self._offers[request.request_id] = _Offer(first, slots, names[: len(slots)])
        return len(slots) * self._block_tokens

    def take(self, request: Request, block_ids: list[int]) -> None:
        """The request has its blocks: what it was offered comes to them."""
        offer = self._offers.pop(request.request_id)
        places = block_ids[offer.first : offer.first + len(offer.slots)]
        load = Load(request.request_id, Swap(places, offer.slots, offer.names))
        self._ledger.use(offer.names)
        self._coming.update(offer.names)
        self._loading[request.request_id] = load
        self._starting.append(load)

    def step_ended(self, output: KVConnectorOutput) -> None:
        """Some of it may have come."""
        for request_id in output.finished_recving or ():
            load = self._loading.pop(request_id, None)
            if load is None:
                continue
            swap, bad = load.swap, output.invalid_block_ids
            spoilt = [
                name for block_id, name in zip(swap.block_ids, swap.names, strict=True) if block_id in bad
            ]
            self._ledger.forget(spoilt)
            self._ledger.give_back(swap.slots)
            self._coming.difference_update(swap.names)
            self.loaded_blocks += len(swap.names) - len(spoilt)

    def _withdraw(self, request_id: str) -> None:
        offer = self._offers.pop(request_id, None)
        if offer is not None:
            self._ledger.give_back(offer.slots)


def _swap_of(saves: Mapping[int, tuple[int, bytes]]) -> Swap:
    block_ids, names = zip(*saves.values(), strict=True)
    return Swap(list(block_ids), list(saves), list(names))
