"""Start and end of an engine core, as its API server sees them.

An API server that gets its sockets' addresses from a launcher does no handshake. Each engine core connects a
DEALER, whose identity is its index as two little-endian bytes, to the API server's ROUTER, and sends one
ReadyResponse; then it connects a PUSH to the API server's PULL and sends outputs.
"""

from __future__ import annotations

import msgspec

ENGINE_IDENTITY = (0).to_bytes(2, "little")
"""The ZMQ identity of the only engine core's DEALER socket."""


class ReadyResponse(msgspec.Struct):
    """vLLM's EngineCoreReadyResponse (a msgpack map)."""

    max_model_len: int
    num_gpu_blocks: int
    block_size: int
    dp_stats_address: str | None
    dtype: str
    vllm_version: str
    world_size: int
    data_parallel_size: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    decode_context_parallel_size: int
    data_parallel_rank: int
    max_num_seqs: int
    max_num_batched_tokens: int
    instance_id: str
    supports_lora: bool
    max_loras: int
    mamba_block_size: int | None = None
    kv_cache_size_tokens: int | None = None
    kv_cache_max_concurrency: float | None = None
    kv_events_config: msgspec.Raw = msgspec.Raw(b"\xc0")
    weight_transfer_backend: str | None = None
    enable_sleep_mode: bool = False
    supports_draft_weight_updates: bool = False
    effective_attention_block_size: int | None = None


_decoder = msgspec.msgpack.Decoder(ReadyResponse)
_encoder = msgspec.msgpack.Encoder()


def read_ready(payload: bytes) -> ReadyResponse:
    """Decode a ready response. Raise msgspec.DecodeError."""
    return _decoder.decode(payload)


def write_ready(response: ReadyResponse) -> bytes:
    """Encode a ready response."""
    return _encoder.encode(response)
