"""A worker's coordinator, put together from the worker's parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tailrace.service.channels import Channels
from tailrace.v1 import bidask_pb2_grpc
from worker_agent.bidask.coordinator import Coordinator
from worker_agent.bidask.fetching import Fetching
from worker_agent.bidask.messages import Wire
from worker_agent.bidask.peers import Tell
from worker_agent.carried import CarriedRequests
from worker_agent.engine.base import Engine, EngineStats
from worker_agent.metrics import WorkerMetrics

_TELL_S: Final = 2.0


def coordinator_of(
    instance_id: str,
    engine: Engine,
    block_tokens: int,
    carried: CarriedRequests,
    channels: Channels,
    migration_service: Callable[[], str | None],
    metrics: WorkerMetrics,
) -> Coordinator:
    """`migration_service`: its address, while there is one. The coordinator's own is still to be set."""
    return Coordinator(
        instance_id,
        lambda request_id: carried.by_id(request_id) is not None,
        lambda: free_tokens(engine.stats(), block_tokens),
        lambda: demand_tokens(engine.stats(), block_tokens),
        Fetching(instance_id, channels, migration_service),
        tell_over(channels),
        metrics.offers,
    )


def free_tokens(stats: EngineStats, block_tokens: int) -> int:
    """Room for a request, with a block for it to grow into."""
    return (stats.kv_blocks_total - stats.kv_blocks_used - 1) * block_tokens


def demand_tokens(stats: EngineStats, block_tokens: int) -> int:
    """KV held and queued: CascadeInfer's request-memory demand."""
    return stats.kv_blocks_used * block_tokens + stats.prefill_backlog_tokens


def tell_over(channels: Channels) -> Tell:
    """Messages by gRPC, each with a deadline."""

    async def tell(address: str, message: Wire) -> None:
        await bidask_pb2_grpc.BidAskStub(channels.get(address)).Tell(message, timeout=_TELL_S)

    return tell
