"""Migrate a request out of an engine: live, with all its state, or by replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from tests.models.sink import Sink, Stream
from worker_agent.engine.base import EngineInfo, Staging
from worker_agent.engine.errors import EngineRefusal
from worker_agent.engine.vllm.engine import VllmEngine
from worker_agent.engine.vllm.kv_blocks import DeviceStaging
from worker_agent.metrics import WorkerHistograms, WorkerMetrics
from worker_agent.parallel.rank_transfers import RankedTransport

_MAX_TRIES = 200


class _SentBlocks:
    """The blocks that the source has sent."""

    def __init__(self, engine: VllmEngine, request_id: str) -> None:
        self._engine = engine
        self._request_id = request_id
        self._parts: list[tuple[int, int, Staging, list[int]]] = []
        self.blocks = 0

    async def pull(self, number: int) -> None:
        """Read the next `number` blocks from the source."""
        if number:
            staging = self._engine.staging(number)
            sums = await self._engine.read_blocks(self._request_id, self.blocks, number, staging)
            self._parts.append((self.blocks, number, staging, sums))
            self.blocks += number

    async def write(self) -> None:
        """Write the blocks to the import, except those that it has found by name."""
        held = self._engine.import_cached(self._request_id)
        for first, number, staging, sums in self._parts:
            skip = min(max(0, held - first), number)
            if skip < number:
                assert isinstance(staging, DeviceStaging)
                rest = staging.part(skip, number - skip)
                await self._engine.write_blocks(
                    self._request_id, first + skip, number - skip, rest, sums[skip:]
                )


@dataclass(frozen=True, slots=True)
class EngineEndpoint:
    """An engine that requests are migrated to. `transport`: only with several ranks."""

    engine: VllmEngine
    transport: RankedTransport | None = None


async def connect_engines(engines: Sequence[VllmEngine], infos: Sequence[EngineInfo]) -> list[EngineEndpoint]:
    """Return endpoints of these engines, which must be started, ready to exchange KV."""
    return [await _endpoint(engine, info) for engine, info in zip(engines, infos, strict=True)]


async def _endpoint(engine: VllmEngine, info: EngineInfo) -> EngineEndpoint:
    if info.ranked is None:
        return EngineEndpoint(engine)
    shape, metrics = info.kv_shape, WorkerMetrics(WorkerHistograms(CollectorRegistry()))
    ucx = {"NET_DEVICES": "lo"}
    transport = await RankedTransport.begin(
        info.ranked, metrics, "models", shape.model_fingerprint, shape.block_tokens, ucx, sealed=False
    )
    return EngineEndpoint(engine, transport)


async def move_live(source: EngineEndpoint, target: EngineEndpoint, stream: Stream) -> bool:
    """Migrate in rounds, as between two workers; return False if the request ended before. Raise RuntimeError
    if it cannot be migrated."""
    for _ in range(_MAX_TRIES):
        if stream.finished:
            return False
        try:
            if source.transport is None or target.transport is None:
                await _move_within_engine(source.engine, stream)
            else:
                await _move_between_engines(source, source.transport, target, target.transport, stream)
        except EngineRefusal:
            # It is queued, in prefill, or has just ended.
            await target.engine.import_drop(stream.request_id)
            await source.engine.export_resume(stream.request_id)
        else:
            return True
    raise RuntimeError(f"{stream.request_id} could not be migrated")


async def move_by_replay(source: EngineEndpoint, target: EngineEndpoint, sink: Sink, stream: Stream) -> bool:
    """Abort the request, and recompute it from its tokens; return False if it had ended."""
    if stream.finished:
        return False
    if source is not target:
        source.engine.abort([stream.key])
    stream.epoch += 1
    sink.resubmit(target.engine, stream)
    return True


async def _evict_prefixes(engine: VllmEngine) -> None:
    await engine._run(
        lambda parts: parts.core.block_pool.evict_blocks(set(range(parts.core.block_pool.num_gpu_blocks)))
    )


async def _move_within_engine(engine: VllmEngine, stream: Stream) -> None:
    """Export the request, and import it into other blocks of the same engine. Raise EngineRefusal while it is
    still in the engine."""
    parts, name = _SentBlocks(engine, stream.request_id), stream.request_id
    exported = await engine.export_open(name)
    await parts.pull(len(exported.block_hashes))
    await parts.pull(len(await engine.export_more(name, parts.blocks)))
    pause = await engine.export_pause(name, parts.blocks)
    await parts.pull(len(pause.block_hashes))
    await engine.export_release(name)
    if stream.epoch % 2:
        # Otherwise it finds its own full blocks by name, which then stay where they are.
        await _evict_prefixes(engine)
    try:
        await engine.import_queue(exported, stream.key, stream.epoch + 1)
        await engine.import_reserve(name, parts.blocks)
        await parts.write()
        await engine.import_prepare(name, pause)
        stream.epoch += 1
        await engine.import_activate(name)
    except EngineRefusal as refusal:
        raise RuntimeError(f"{name} is lost: {refusal}") from refusal


async def _move_between_engines(
    source: EngineEndpoint,
    sender: RankedTransport,
    target: EngineEndpoint,
    receiver: RankedTransport,
    stream: Stream,
) -> None:
    """Let every rank of the target pull from its counterpart. Raise EngineRefusal while the request is still
    at its source."""
    name = stream.request_id
    exported = await source.engine.export_open(name)
    session = await sender.open(name, receiver.addresses)
    received = 0

    async def pull(hashes: Sequence[bytes]) -> None:
        nonlocal received
        await target.engine.import_reserve(name, received + len(hashes))
        await transfer.pull(received, hashes)
        received += len(hashes)

    try:
        await target.engine.import_queue(exported, stream.key, stream.epoch + 1)
        received = target.engine.import_cached(name)
        transfer = await receiver.connect(name, sender.addresses, session.tickets)
        try:
            await session.announce(0, exported.block_hashes)
            await pull(exported.block_hashes[received:])
            more = await source.engine.export_more(name, received)
            await session.announce(received, more)
            await pull(more)
            pause = await source.engine.export_pause(name, received)
            await session.announce(received, pause.block_hashes)
            await pull(pause.block_hashes)
            await target.engine.import_prepare(name, pause)
            session.taken = True
        finally:
            await transfer.close()
    finally:
        await session.end()
    await source.engine.export_release(name)
    stream.epoch += 1
    await target.engine.import_activate(name)
