"""How a worker's KV goes to others: from this process, or from its engine's ranks."""

from __future__ import annotations

from worker_agent.engine.base import Engine, EngineInfo
from worker_agent.faults import Faults
from worker_agent.kv.client import KvClient
from worker_agent.kv.segments import SharedMemory
from worker_agent.kv.server import KvServer
from worker_agent.kv.single import SingleTransport
from worker_agent.kv.staging import StagingPool
from worker_agent.kv.transport import ucx_started_with
from worker_agent.metrics import WorkerMetrics
from worker_agent.ranks.transfers import RankedTransport


async def kv_transport(
    instance_id: str,
    engine: Engine,
    info: EngineInfo,
    memory: SharedMemory,
    faults: Faults,
    metrics: WorkerMetrics,
) -> SingleTransport | RankedTransport:
    """The transport of a started engine. UCX must be started. Raises KvTransferError."""
    shape = info.kv_shape
    if info.ranked is not None:
        return await RankedTransport.begin(
            info.ranked,
            metrics,
            instance_id,
            shape.model_fingerprint,
            shape.block_tokens,
            ucx_started_with(),
        )
    pool = StagingPool(engine, shape.block_bytes)
    server = KvServer(engine, shape, pool, memory.segments, faults, metrics)
    return SingleTransport(engine, server, KvClient(shape, pool, memory.mappings, metrics))
