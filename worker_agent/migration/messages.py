"""Convert between the engine's types and protobuf messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tailrace.cluster import Phase
from tailrace.messages import PHASES
from tailrace.v1 import worker_pb2
from worker_agent.engine.base import Exported, ExportedPause, KvShape, RequestKey
from worker_agent.kv.address import KvTransferError, Ticket


def kv_layout(shape: KvShape) -> worker_pb2.KvLayout:
    """Return the shape as a message."""
    return worker_pb2.KvLayout(
        model_fingerprint=shape.model_fingerprint,
        block_tokens=shape.block_tokens,
        num_layers=shape.num_layers,
        layer_block_bytes=shape.layer_block_bytes,
        tensor_parallel_size=shape.tensor_parallel_size,
        pipeline_parallel_size=shape.pipeline_parallel_size,
    )


def layout_difference(own: KvShape, peer: worker_pb2.KvLayout) -> str:
    """Return why the two cannot exchange KV, naming the settings that differ; empty if they can."""
    if own.block_tokens != peer.block_tokens:
        return f"KV blocks of {peer.block_tokens} tokens against {own.block_tokens} (block_size)"
    for setting in ("tensor_parallel_size", "pipeline_parallel_size"):
        # 0: a worker of a version without parallelism.
        peer_value, own_value = getattr(peer, setting) or 1, getattr(own, setting)
        if peer_value != own_value:
            return f"{setting} {peer_value} against {own_value}"
    if own.model_fingerprint != peer.model_fingerprint:
        return "the models' KV, its format (kv_cache_dtype), its layout or the versions of vLLM differ"
    if (own.num_layers, own.layer_block_bytes) != (peer.num_layers, peer.layer_block_bytes):
        source = f"{peer.num_layers} layers of {peer.layer_block_bytes} bytes a block"
        return f"{source} against {own.num_layers} of {own.layer_block_bytes}"
    return ""


def block_identities(hashes: Iterable[bytes]) -> list[worker_pb2.BlockIdentity]:
    """Return block hashes as messages."""
    return [worker_pb2.BlockIdentity(hash=name) for name in hashes]


def block_hashes(blocks: Sequence[worker_pb2.BlockIdentity]) -> list[bytes]:
    """Return the block hashes of messages."""
    return [block.hash for block in blocks]


def exported_of(opened: worker_pb2.ExportOpened, key: RequestKey) -> Exported:
    """Return the snapshot for the target's engine; `key` identifies the request on the target."""
    return Exported(
        key=key,
        frontend_id=opened.frontend_id,
        epoch=opened.epoch,
        frames=list(opened.frames),
        output_token_ids=list(opened.output_token_ids),
        phase=PHASES.get(opened.phase, Phase.PREFILL),
        traceparent=opened.traceparent,
        block_hashes=block_hashes(opened.blocks),
        adapter_version=opened.adapter_version,
    )


def pause_of(paused: worker_pb2.ExportPaused) -> ExportedPause:
    """Return the remaining state for the target's engine."""
    return ExportedPause(
        new_output_token_ids=list(paused.new_output_token_ids),
        computed_tokens=paused.computed_tokens,
        block_hashes=block_hashes(paused.blocks),
        sampling_state=paused.sampling_state,
        token_interval_ms=paused.token_interval_ms,
        predicted_remaining_tokens=(
            paused.predicted_remaining_tokens if paused.HasField("predicted_remaining_tokens") else None
        ),
        waited_s=paused.waited_s,
        answering_for_s=paused.answer_pace.since_first_s,
    )


def tickets_of(opened: worker_pb2.ExportOpened) -> list[Ticket]:
    """Return the tickets for the source's blocks, one per endpoint. Raise KvTransferError."""
    try:
        return [Ticket(secret) for secret in opened.kv_tickets]
    except ValueError as error:
        raise KvTransferError(f"the source gave no ticket: {error}") from error
