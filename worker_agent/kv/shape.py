"""The shape of KV blocks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KvShape:
    """Shape of a block's KV; two engines exchange KV only if theirs are equal."""

    model_fingerprint: str
    block_tokens: int
    # Of all ranks together.
    num_layers: int
    layer_block_bytes: int
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers and ranks."""
        return self.num_layers * self.layer_block_bytes
