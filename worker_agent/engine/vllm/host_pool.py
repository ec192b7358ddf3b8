"""Host memory for KV: the bytes of each block, with their checksum and content name (`HostPool`), and its use
as a second tier of the prefix cache (`HostTier`)."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.v1.core.kv_cache_utils import KVCacheBlock, get_block_hash
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from worker_agent.engine.errors import EngineRefusal, KvCorrupt
from worker_agent.engine.host_ledger import HostLedger
from worker_agent.engine.vllm.kv_blocks import DeviceStaging, KvBlocks

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Swap:
    """A copy of blocks between the device and host memory: entry i of each list describes one block."""

    block_ids: list[int]
    slots: list[int]
    # See kv_names; from the tokens that the scheduler knows now.
    names: list[bytes]


@dataclass(frozen=True, slots=True)
class Load:
    """A copy of prompt blocks to the device while the request waits and steps for other requests continue."""

    request_id: str
    swap: Swap


@dataclass(slots=True)
class SwapMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """The copies of one step. `swap_outs` run first, in order, then `swap_ins`, which complete before the
    forward pass; `loads` are started last and complete in later steps."""

    swap_outs: list[Swap] = field(default_factory=list)
    swap_ins: list[Swap] = field(default_factory=list)
    # Requests that read KV loaded in this step.
    swapped_in: set[str] = field(default_factory=set)
    loads: list[Load] = field(default_factory=list)


def kv_names(request: Request, tokens: int, block_tokens: int) -> list[bytes]:
    """Return the name of each block that holds KV of the first `tokens` tokens.

    A full block's name is vLLM's hash of its tokens and all before them. The name of a partial last block is
    a hash of the previous block's name and its own tokens so far.
    """
    full, rest = divmod(tokens, block_tokens)
    names = [bytes(block_hash) for block_hash in request.block_hashes[:full]]
    if rest:
        digest = blake2b(names[-1] if names else b"", digest_size=32)
        for token_id in request.all_token_ids[full * block_tokens : tokens]:
            digest.update(int(token_id).to_bytes(8, "little"))
        names.append(digest.digest())
    return names


# vLLM's own swap space was 4 GiB until version 0.7.
_DEFAULT_BYTES: Final = 4 << 30
# Upper limit of the default, as a share of the machine's memory.
_DEFAULT_SHARE: Final = 1 / 8
_CHUNK_BYTES: Final = 32 << 20


def default_host_bytes() -> int:
    """Return 4 GiB, or an eighth of the machine's memory if that is less."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(_DEFAULT_BYTES, int(memory * _DEFAULT_SHARE))


@dataclass(frozen=True, slots=True)
class HostSlot:
    """A block in host memory."""

    slot: int


class HostPool:
    """Slots of one block each. The system allocates the memory on first use; page-locked if there is a GPU.

    Safe to use from any thread for slots that no other thread writes.
    """

    def __init__(self, kv: KvBlocks, host_bytes: int) -> None:
        """Create as many slots as whole blocks fit into `host_bytes`."""
        self._kv = kv
        self.block_bytes = kv.num_layers * kv.layer_block_bytes
        self.slots = host_bytes // self.block_bytes
        self.corrupt_blocks = 0
        memory = torch.empty(
            (self.slots, kv.num_layers, kv.layer_block_bytes),
            dtype=torch.uint8,
            pin_memory=kv.device.type == "cuda",
        )
        # Row i is slot i.
        self._memory = DeviceStaging(memory)
        # By slot: (checksum, name).
        self._tags: dict[int, tuple[int, bytes]] = {}
        self._chunk = max(1, _CHUNK_BYTES // self.block_bytes)

    def save(self, block_ids: Sequence[int], slots: Sequence[int], names: Sequence[bytes]) -> bool:
        """Copy blocks from the device to host memory. Return False, with nothing in the slots, if the device
        has no memory for that."""
        try:
            self._save(block_ids, slots, names)
        except EngineRefusal as refusal:
            _log.warning("%d KV blocks are not saved to host memory: %s", len(slots), refusal)
            for slot in slots:
                self._tags.pop(slot, None)
            return False
        return True

    def _save(self, block_ids: Sequence[int], slots: Sequence[int], names: Sequence[bytes]) -> None:
        if self._kv.on_host:
            # The slots are like any other memory: the step that waits for the copy makes only one.
            self._tag(slots, self._kv.gather_to(block_ids, self._memory, slots), names)
            return
        staging = self._kv.staging(min(self._chunk, len(slots)))
        for first in range(0, len(slots), self._chunk):
            part = slice(first, first + self._chunk)
            sums = self._kv.gather(block_ids[part], staging)
            self.put(slots[part], staging, sums, names[part])

    def load(self, slots: Sequence[int], block_ids: Sequence[int], names: Sequence[bytes]) -> list[int]:
        """Copy blocks to the device and return the IDs of the corrupt ones; all of them if some were never
        saved, or the device has no memory for the copy.

        Names and checksums are verified on the device, before the blocks are written to the KV cache.
        """
        try:
            return self._load(slots, block_ids, names)
        except EngineRefusal as refusal:
            _log.warning("%d KV blocks are not loaded from host memory: %s", len(slots), refusal)
            return list(block_ids)

    def _load(self, slots: Sequence[int], block_ids: Sequence[int], names: Sequence[bytes]) -> list[int]:
        bad: list[int] = []
        staging = self._kv.staging(min(self._chunk, len(slots)))
        for first in range(0, len(slots), self._chunk):
            part = slice(first, first + self._chunk)
            sums = self.read(slots[part], staging)
            found = self._kv.checksums(staging, len(sums))
            wrong = [
                block_id
                for slot, block_id, name, expected, actual in zip(
                    slots[part], block_ids[part], names[part], sums, found, strict=True
                )
                if expected != actual or self._tags[slot][1] != name
            ]
            self.corrupt_blocks += len(wrong)
            bad += wrong
            self._kv.scatter(staging, block_ids[part])
        return bad

    def put(
        self, slots: Sequence[int], staging: DeviceStaging, checksums: Sequence[int], names: Sequence[bytes]
    ) -> None:
        """Store the first blocks of `staging`, which have these checksums."""
        with self._kv.stream():
            for row, slot in enumerate(slots):
                self._memory.bytes[slot].copy_(staging.bytes[row], non_blocking=True)
        self._tag(slots, checksums, names)

    def read(self, slots: Sequence[int], staging: DeviceStaging) -> list[int]:
        """Copy slots to the front of `staging` and return the checksums that they were stored under. Raise
        EngineRefusal if one is empty."""
        with self._kv.stream():
            for row, slot in enumerate(slots):
                staging.bytes[row].copy_(self._memory.bytes[slot], non_blocking=True)
        if not self._tags.keys() >= set(slots):
            raise EngineRefusal("the blocks were not saved")
        return [self._tags[slot][0] for slot in slots]

    def _tag(self, slots: Sequence[int], checksums: Sequence[int], names: Sequence[bytes]) -> None:
        for slot, checksum, name in zip(slots, checksums, names, strict=True):
            self._tags[slot] = (checksum, name)

    def set_name(self, slot: int, name: bytes) -> None:
        """Name a block stored before its tokens were known. Raises KvCorrupt if the slot is empty."""
        tag = self._tags.get(slot)
        if tag is None:
            raise KvCorrupt(f"nothing was put into slot {slot}")
        self._tags[slot] = (tag[0], name)


class HostLoads:
    """Loads blocks of a pool without blocking engine steps, one load at a time on its own thread.

    Methods are called on the engine thread only.
    """

    def __init__(self, pool: HostPool) -> None:
        self._pool = pool
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="kv-from-host")
        # By request; the result lists the corrupt blocks.
        self._running: dict[str, Future[list[int]]] = {}

    def start(self, load: Load) -> None:
        """Queue a load; until it completes, the request must keep its blocks."""
        swap = load.swap
        self._running[load.request_id] = self._executor.submit(
            self._pool.load, swap.slots, swap.block_ids, swap.names
        )

    def pop_completed(self) -> dict[str, list[int]]:
        """Return the requests whose loads have completed since the last call, with their corrupt blocks."""
        done = {name: running.result() for name, running in self._running.items() if running.done()}
        for name in done:
            del self._running[name]
        return done

    def close(self) -> None:
        """Wait for the current load and cancel those that have not begun."""
        self._executor.shutdown(wait=True, cancel_futures=True)


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
        if not self._pool.save(swap.block_ids, swap.slots, swap.names):
            self._ledger.discard(swap.names)

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
