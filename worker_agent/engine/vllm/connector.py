"""The KV connector: gives this process the engine's KV tensors, and nothing to vLLM's scheduler.

Requests come in and out through the engine's imports and exports, which write to blocks that are reserved and
read blocks that are pinned; so no step ever waits for a transfer, and vLLM is never told of external hits.
"""

from __future__ import annotations

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig
from vllm.v1.request import Request

from worker_agent.engine.vllm.kv_blocks import KvBlocks


class TailraceConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Worker side: `blocks` reads and writes KV by block. Scheduler side: nothing to do."""

    blocks: KvBlocks | None

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._metadata = KVConnectorMetadata()
        self.blocks = None
        groups = kv_cache_config.kv_cache_groups
        if len(groups) != 1 or not isinstance(groups[0].kv_cache_spec, FullAttentionSpec):
            raise RuntimeError(
                "only models with full attention in every layer can be migrated: this one has KV groups "
                f"{[type(group.kv_cache_spec).__name__ for group in groups]}"
            )
        if kv_cache_config.needs_kv_cache_zeroing:
            raise RuntimeError("KV caches of mixed precision cannot be migrated")

    @property
    def requires_kv_delivery(self) -> bool:
        # Blocks handed over are pinned by the export: a preemption needs no special care.
        return False

    # ---- worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.blocks = KvBlocks(list(kv_caches.values()), self._kv_cache_config.num_blocks)

    def start_load_kv(self, forward_context: object, **kwargs: object) -> None:
        return

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: object, **kwargs: object
    ) -> None:
        return

    def wait_for_save(self) -> None:
        return

    # ---- scheduler side

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        return

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self._metadata
