"""Register the worker in etcd."""

from __future__ import annotations

import time

import msgspec

from tailrace.records import InstanceRecord
from tailrace.store.registration import Registration, register
from tailrace.store.store import Store
from worker_agent.engine.base import EngineInfo


def instance_record(
    instance_id: str,
    incarnation: str,
    address: str,
    stream_address: str,
    metrics_address: str,
    info: EngineInfo,
    profile_kind: str,
) -> InstanceRecord:
    """Return the worker's record. `profile_kind`: kind of the measured profile that applies to it, or
    empty."""
    shape = info.kv_shape
    return InstanceRecord(
        instance_id=instance_id,
        incarnation=incarnation,
        address=address,
        stream_address=stream_address,
        metrics_address=metrics_address,
        engine=info.engine,
        model=info.model,
        model_fingerprint=shape.model_fingerprint,
        model_identity=info.identity,
        block_tokens=shape.block_tokens,
        kv_blocks_total=info.kv_blocks_total,
        max_model_len=info.max_model_len,
        max_num_seqs=info.max_num_seqs,
        kv_bytes_per_token=shape.block_bytes // shape.block_tokens,
        started_s=time.time(),
        profile_kind=profile_kind,
        handover=info.handover,
        pooling=info.pooling,
        takes_adapters=info.takes_adapters,
        ranks=list(info.ranks),
        tensor_parallel_size=shape.tensor_parallel_size,
        pipeline_parallel_size=shape.pipeline_parallel_size,
        block_naming=info.naming,
    )


async def register_instance(store: Store, record: InstanceRecord, ttl_s: float) -> Registration:
    """Register the worker; `withdraw()` of the result removes it. Raise StoreUnavailable."""
    return await register(store, f"instances/{record.instance_id}", msgspec.json.encode(record), ttl_s)
