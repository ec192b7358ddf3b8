"""The KV connector: gives this process the engine's KV tensors, and swaps preempted requests to host memory.

Migrations come in and out through the engine's imports and exports, which write to blocks that are reserved
and read blocks that are pinned; no step waits for those, and vLLM is never told of them. Swaps are vLLM's to
time: a preempted request's blocks are copied out at the start of the very step that may overwrite them
(`handle_preemptions`), and when the request is admitted again its tokens count as external hits that are
loaded before the forward pass (`start_load_kv`). Prefixes that were evicted come back the same way, but
beside the steps (`host_tier.py`).
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
from worker_agent.engine.vllm.host_loads import HostLoads
from worker_agent.engine.vllm.host_pool import HostPool
from worker_agent.engine.vllm.host_tier import HostTier
from worker_agent.engine.vllm.kv_blocks import KvBlocks
from worker_agent.engine.vllm.kv_names import kv_names
from worker_agent.engine.vllm.layouts import layout_name, live_reason, pages
from worker_agent.engine.vllm.swaps import Swap, SwapMetadata


class TailraceConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Worker side: `blocks` reads and writes KV by block, `pool` holds what is in host memory, `loads` brings
    prefixes back from there.

    Scheduler side: `ledger` says who has which slot of the pool, `tier` what comes back of evicted prefixes.
    All are attached once the engine is loaded; before, and with no host memory, nothing is swapped. Models
    with several KV cache groups have none: vLLM cannot be told there which blocks did not come back whole.
    Nor has an engine of several ranks, whose worker sides are in processes of their own.
    """

    blocks: KvBlocks | None
    layout_name: str
    # Why requests cannot move live with this layout; empty: they can.
    live_reason: str
    pool: HostPool | None
    # None: no evicted prefixes are kept.
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
        # Blocks handed over are pinned by the export: a preemption needs no special care.
        return False

    # ---- worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        config = self._kv_cache_config
        self.blocks = KvBlocks(pages(kv_caches, config), config.num_blocks)
        self.layout_name = layout_name(kv_caches, config)
        self.live_reason = live_reason(config)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, SwapMetadata)
        if kv_connector_metadata.out:
            assert self.blocks is not None
            self.blocks.wait_for_steps()
        for swap in kv_connector_metadata.out:
            assert self.pool is not None
            self.pool.save(swap.block_ids, swap.slots, swap.names)

    def start_load_kv(self, forward_context: object, **kwargs: object) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, SwapMetadata)
        for swap in metadata.back:
            assert self.pool is not None
            self._bad_blocks.update(self.pool.load(swap.slots, swap.block_ids, swap.names))
        if metadata.loads:
            assert self.blocks is not None
            # Of the blocks, vLLM may be about to write zeros to.
            self.blocks.wait_for_steps()
        for load in metadata.loads:
            assert self.loads is not None
            self.loads.start(load)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        ended = {} if self.loads is None else self.loads.ended()
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

    def step_begins(self) -> None:
        """The last step's loads are complete: what they read may be written."""
        self.ledger.give_back(self._read_slots)
        self._read_slots = []
        if self.tier is not None:
            self.tier.step_begins()

    def swap_out(self, request: Request, block_ids: list[int]) -> None:
        """A decoding request loses its place: keep its KV if there is room. Only inside a step's schedule."""
        # vLLM recomputes a request that is to read no cache (one that wants logprobs of its prompt).
        if not self.ledger.total or request.skip_reading_prefix_cache:
            return
        tokens = request.num_computed_tokens
        if tokens > request.num_tokens:
            # KV of a token that is not known yet has no name.
            return
        names = kv_names(request, tokens, self._block_tokens)
        swapped = self.ledger.swap_out(request.request_id, tokens, names)
        if swapped is not None:
            self._swaps.out.append(Swap(block_ids[: len(names)], swapped.slots, names))

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
                self.tier.take(request, blocks.get_block_ids()[0])
            return
        self._read_slots += swapped.slots
        if not num_external_tokens:
            return
        first = (swapped.tokens - num_external_tokens) // self._block_tokens
        names = kv_names(request, swapped.tokens, self._block_tokens)
        block_ids = blocks.get_block_ids()[0]
        self._swaps.loaded.add(request.request_id)
        self._swaps.back.append(Swap(block_ids[first : len(names)], swapped.slots[first:], names[first:]))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        swaps, self._swaps = self._swaps, SwapMetadata()
        if self.tier is not None:
            saves, swaps.loads = self.tier.step_scheduled()
            # A slot of theirs may have gone to a request in the same step.
            swaps.out = [*saves, *swaps.out]
        return swaps

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if self.tier is not None:
            self.tier.step_ended(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, None]:
        self.ledger.drop(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, None]:
        return self.request_finished(request, block_ids[0])
