"""What vLLM's prefix cache gains and loses, from its own KV events, into the book of names."""

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
from tailrace.cache.names import Naming, short
from tailrace.cache.tiers import Tier
from worker_agent.engine.vllm.load import LoadedCore


class CacheWatch(EventPublisher):  # type: ignore[misc]
    """Stands where vLLM publishes its events, after each step; hands them on to whoever stood there.

    Of several cache groups the first stands for all: a prefix is found only if each group has its blocks.

    Several blocks may have one name, and each of them is told: a name is gone with the last of them. Engine
    thread only, but for `book`.
    """

    def __init__(self, onward: EventPublisher) -> None:
        super().__init__()
        self.book = CacheBook()
        self._onward = onward
        # Blocks of each name.
        self._copies: Counter[int] = Counter()

    @staticmethod
    def of(core: LoadedCore) -> CacheWatch | None:
        """Watches from now on; None: this engine keeps no prefixes, or does not name all of its blocks."""
        if not core.block_pool.enable_caching or core.scheduler.hash_block_size != core.block_tokens:
            return None
        watch = CacheWatch(core.scheduler.kv_event_publisher)
        core.host.told = watch._on_host
        core.block_pool.enable_kv_cache_events = True
        core.scheduler.kv_event_publisher = watch
        return watch

    def _on_host(self, stored: Sequence[bytes], gone: Sequence[bytes]) -> None:
        """Host memory has gained and lost these."""
        self.book.change([short(name) for name in stored], [short(name) for name in gone], Tier.HOST)

    def publish(self, events: EventBatch) -> None:
        """EventPublisher.publish."""
        # Whether each name that is told of is there in the end.
        held: dict[int, bool] = {}
        for event in events.events:
            if isinstance(event, AllBlocksCleared):
                held.clear()
                self._copies.clear()
                self.book.clear()
            elif isinstance(event, BlockStored | BlockRemoved) and not event.group_idx:
                if event.medium not in (None, MEDIUM_GPU):
                    # Of another connector, which keeps KV elsewhere.
                    continue
                by = 1 if isinstance(event, BlockStored) else -1
                for name in map(_name, event.block_hashes):
                    self._copies[name] += by
                    held[name] = self._copies[name] > 0
        if held:
            gone = [name for name, there in held.items() if not there]
            for name in gone:
                del self._copies[name]
            self.book.change([name for name, there in held.items() if there], gone)
        self._onward.publish(events)

    def shutdown(self) -> None:
        """EventPublisher.shutdown."""
        self._onward.shutdown()

    def get_publisher_config(self) -> KVEventsConfig | None:
        """EventPublisher.get_publisher_config."""
        return self._onward.get_publisher_config()


def _name(block_hash: ExternalBlockHash) -> int:
    """vLLM tells whole hashes, or by default the same 64 bits of them."""
    return short(block_hash) if isinstance(block_hash, bytes) else block_hash


def naming_of(core: LoadedCore) -> Naming:
    """How this engine names its blocks."""
    return Naming(
        algorithm=str(core.config.cache_config.prefix_caching_hash_algo),
        seed=get_none_hash_seed(),
        block_tokens=core.scheduler.hash_block_size,
    )


def to_be_found(request: Request, book: CacheBook, block_tokens: int) -> int:
    """Tokens of a request that waits for its first step that it is likely to find in the cache.

    By bisection: blocks of a prefix are evicted from its end. Any thread.
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
