"""Record in a CacheBook which blocks vLLM's prefix cache stores and removes, from vLLM's KV events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import (
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    EventPublisher,
)
from vllm.v1.core.kv_cache_utils import ExternalBlockHash, get_none_hash_seed
from vllm.v1.request import Request, RequestStatus

from tailrace.cache.book import CacheBook
from tailrace.cache.index import Tier
from tailrace.cache.names import Naming, short
from worker_agent.engine.vllm.load import LoadedCore


class CacheWatch(EventPublisher):  # type: ignore[misc]
    """Replaces vLLM's event publisher, which publishes after each step, and forwards all events to it.

    The first cache group represents all groups: a prefix is found only if each group has its blocks.

    Several blocks may have the same name, each with its own events; a name is removed with the last of them.
    Engine thread only, except `book`.
    """

    def __init__(self, downstream: EventPublisher) -> None:
        super().__init__()
        self.book = CacheBook()
        self._downstream = downstream
        # Number of blocks by name.
        self._copies: Counter[int] = Counter()

    @staticmethod
    def of(core: LoadedCore) -> CacheWatch | None:
        """Start watching an engine. Return None if it has no prefix cache or does not name all blocks."""
        if not core.block_pool.enable_caching or core.scheduler.hash_block_size != core.block_tokens:
            return None
        watch = CacheWatch(core.scheduler.kv_event_publisher)
        core.host.on_change = watch._on_host_change
        core.block_pool.enable_kv_cache_events = True
        core.scheduler.kv_event_publisher = watch
        return watch

    def _on_host_change(self, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """Record blocks that host memory has stored and removed."""
        self.book.change([short(name) for name in stored], [short(name) for name in removed], Tier.HOST)

    def publish(self, events: EventBatch) -> None:
        # For each name in these events, whether it is in the cache after all of them.
        present: dict[int, bool] = {}
        for event in events.events:
            if isinstance(event, AllBlocksCleared):
                present.clear()
                self._copies.clear()
                self.book.clear()
            elif isinstance(event, BlockStored | BlockRemoved) and not event.group_idx:
                if event.medium not in (None, MEDIUM_GPU):
                    # From another connector, which stores KV elsewhere.
                    continue
                by = 1 if isinstance(event, BlockStored) else -1
                for name in map(_name, event.block_hashes):
                    self._copies[name] += by
                    present[name] = self._copies[name] > 0
        if present:
            removed = [name for name, is_present in present.items() if not is_present]
            for name in removed:
                del self._copies[name]
            self.book.change([name for name, is_present in present.items() if is_present], removed)
        self._downstream.publish(events)

    def shutdown(self) -> None:
        self._downstream.shutdown()

    def get_publisher_config(self) -> KVEventsConfig | None:
        return self._downstream.get_publisher_config()


def _name(block_hash: ExternalBlockHash) -> int:
    """Return the 64-bit name of a hash; vLLM's events have whole hashes or, by default, the same 64 bits."""
    return short(block_hash) if isinstance(block_hash, bytes) else block_hash


def naming_of(core: LoadedCore) -> Naming:
    """Return how this engine names its blocks."""
    return Naming(
        algorithm=str(core.config.cache_config.prefix_caching_hash_algo),
        seed=get_none_hash_seed(),
        block_tokens=core.scheduler.hash_block_size,
    )


def expected_hit_tokens(request: Request, book: CacheBook, block_tokens: int) -> int:
    """Return how many tokens a request that waits for its first step is likely to find in the cache.

    Bisects, because the blocks of a prefix are evicted from its end. Any thread.
    """
    if request.status != RequestStatus.WAITING or request.num_computed_tokens:
        return 0
    hashes = request.block_hashes
    low, high = 0, min(len(hashes), (request.num_tokens - 1) // block_tokens)
    while low < high:
        middle = (low + high + 1) // 2
        if book.holds(short(hashes[middle - 1])):
            low = middle
        else:
            high = middle - 1
    return low * block_tokens
