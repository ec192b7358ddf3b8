"""The KV connector: gives this process access to the engine's KV tensors, and swaps requests to host memory.

Migrations do not go through vLLM's connector interface: the engine's imports write to reserved blocks and its
exports read pinned ones, without any step waiting for them. For swaps, vLLM determines the time: a preempted
request's blocks are copied out at the start of the step that may overwrite them (`handle_preemptions`), and
when the request is admitted again, its tokens count as external hits and are loaded before the forward pass
(`start_load_kv`). Evicted prefixes are loaded the same way, but concurrently with steps (`host_tier.py`).
"""

from __future__ import annotations

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from worker_agent.engine.host_ledger import HostLedger
from worker_agent.engine.vllm.host_pool import HostLoads, HostPool, Swap, SwapMetadata, kv_names
from worker_agent.engine.vllm.host_tier import HostTier
from worker_agent.engine.vllm.kv_blocks import KvBlocks
from worker_agent.engine.vllm.layouts import layout_name, live_reason, pages


class TailraceConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Worker side: `blocks` reads and writes KV by block, `pool` is the host memory, `loads` copies prefixes
    from it to the device.

    Scheduler side: `ledger` keeps track of the pool's slots, `tier` of evicted prefixes. All are attached
    once the engine is loaded; before that, and without host memory, nothing is swapped. Models with several
    KV cache groups do not swap, because vLLM does not accept corrupt blocks from a connector there. Engines
    with several ranks do not either, because their worker sides are in other processes.
    """

    blocks: KvBlocks | None
    layout_name: str
    # Why requests with this layout cannot migrate live; empty if they can.
    live_reason: str
    pool: HostPool | None
    # None if evicted prefixes are not cached.
    loads: HostLoads | None
    ledger: HostLedger
    tier: HostTier | None

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.blocks = None
        self.layout_name = self.live_reason = ""
        self.pool = None
        self.loads = None
        self.ledger = HostLedger(0, 0)
        self.tier = None
        self._block_tokens: int = vllm_config.cache_config.block_size
        self._swaps = SwapMetadata()
        # Slots that the step in progress reads.
        self._read_slots: list[int] = []
        self._bad_blocks: set[int] = set()

    @property
    def requires_kv_delivery(self) -> bool:
        # Exports pin the blocks that they hand over, so preemption needs no special care.
        return False

    # ---- worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        config = self._kv_cache_config
        self.blocks = KvBlocks(pages(kv_caches, config), config.num_blocks)
        self.layout_name = layout_name(kv_caches, config)
        self.live_reason = live_reason(config)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, SwapMetadata)
        if kv_connector_metadata.swap_outs:
            assert self.blocks is not None
            self.blocks.wait_for_steps()
        for swap in kv_connector_metadata.swap_outs:
            assert self.pool is not None
            self.pool.save(swap.block_ids, swap.slots, swap.names)

    def start_load_kv(self, forward_context: object, **kwargs: object) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, SwapMetadata)
        for swap in metadata.swap_ins:
            assert self.pool is not None
            self._bad_blocks.update(self.pool.load(swap.slots, swap.block_ids, swap.names))
        if metadata.loads:
            assert self.blocks is not None
            # vLLM may still have to zero some of the blocks.
            self.blocks.wait_for_steps()
        for load in metadata.loads:
            assert self.loads is not None
            self.loads.start(load)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        ended = {} if self.loads is None else self.loads.pop_completed()
        for bad in ended.values():
            self._bad_blocks.update(bad)
        return None, set(ended) or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: object, **kwargs: object
    ) -> None:
        return

    def wait_for_save(self) -> None:
        return

    def shutdown(self) -> None:
        if self.loads is not None:
            self.loads.close()

    # ---- scheduler side

    def begin_schedule(self) -> None:
        """Release the slots that the last step's swap-ins have read, and start collecting evictions."""
        self.ledger.release(self._read_slots)
        self._read_slots = []
        if self.tier is not None:
            self.tier.begin_schedule()

    def swap_out(self, request: Request, block_ids: list[int]) -> None:
        """Keep a preempted decoding request's KV in host memory if there is room. Call only while scheduling
        a step."""
        # vLLM recomputes requests that must not read the cache (those that want logprobs of their prompt).
        if not self.ledger.total or request.skip_reading_prefix_cache:
            return
        tokens = request.num_computed_tokens
        if tokens > request.num_tokens:
            # The KV of a token that is not known yet has no name.
            return
        names = kv_names(request, tokens, self._block_tokens)
        swapped = self.ledger.swap_out(request.request_id, tokens, names)
        if swapped is not None:
            self._swaps.swap_outs.append(Swap(block_ids[: len(names)], swapped.slots, names))

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        swapped = self.ledger.get(request.request_id)
        if swapped is not None:
            return max(0, swapped.tokens - num_computed_tokens), False
        if self.tier is None:
            return 0, False
        kept = self.tier.match(request, num_computed_tokens)
        return kept, bool(kept)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        swapped = self.ledger.swap_in(request.request_id)
        if swapped is None:
            if num_external_tokens and self.tier is not None:
                self.tier.start_load(request, blocks.get_block_ids()[0])
            return
        self._read_slots += swapped.slots
        if not num_external_tokens:
            return
        first = (swapped.tokens - num_external_tokens) // self._block_tokens
        names = kv_names(request, swapped.tokens, self._block_tokens)
        block_ids = blocks.get_block_ids()[0]
        self._swaps.swapped_in.add(request.request_id)
        self._swaps.swap_ins.append(Swap(block_ids[first : len(names)], swapped.slots[first:], names[first:]))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        swaps, self._swaps = self._swaps, SwapMetadata()
        if self.tier is not None:
            saves, swaps.loads = self.tier.end_schedule()
            # A request that was swapped out in this step may reuse a slot that these have lost.
            swaps.swap_outs = [*saves, *swaps.swap_outs]
        return swaps

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if self.tier is not None:
            self.tier.complete_loads(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, None]:
        self.ledger.drop(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, None]:
        return self.request_finished(request, block_ids[0])
