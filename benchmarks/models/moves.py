"""A request that is moved out of an engine: live, with all its state, or by replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from benchmarks.models.sink import Sink, Stream
from worker_agent.engine.base import EngineInfo, Staging
from worker_agent.engine.errors import EngineRefusal
from worker_agent.engine.vllm.engine import VllmEngine
from worker_agent.engine.vllm.kv_blocks import DeviceStaging
from worker_agent.metrics import WorkerHistograms, WorkerMetrics
from worker_agent.ranks.transfers import RankedTransport

_TRIES = 200


class _Parts:
    """What the source sent, block by block."""

    def __init__(self, engine: VllmEngine, request_id: str) -> None:
        self._engine = engine
        self._request_id = request_id
        self._parts: list[tuple[int, int, Staging, list[int]]] = []
        self.blocks = 0

    async def pull(self, number: int) -> None:
        """Read the next blocks."""
        if number:
            staging = self._engine.staging(number)
            sums = await self._engine.read_blocks(self._request_id, self.blocks, number, staging)
            self._parts.append((self.blocks, number, staging, sums))
            self.blocks += number

    async def write(self) -> None:
        """Write those into the import that it has not found by name."""
        held = self._engine.import_held(self._request_id)
        for first, number, staging, sums in self._parts:
            skip = min(max(0, held - first), number)
            if skip < number:
                assert isinstance(staging, DeviceStaging)
                rest = staging.part(skip, number - skip)
                await self._engine.write_blocks(
                    self._request_id, first + skip, number - skip, rest, sums[skip:]
                )


@dataclass(frozen=True, slots=True)
class Place:
    """An engine that requests are moved to. `transport`: of one with several ranks."""

    engine: VllmEngine
    transport: RankedTransport | None = None


async def places_of(engines: Sequence[VllmEngine], infos: Sequence[EngineInfo]) -> list[Place]:
    """These engines, which were started, ready to exchange KV."""
    return [await _place(engine, info) for engine, info in zip(engines, infos, strict=True)]


async def _place(engine: VllmEngine, info: EngineInfo) -> Place:
    if info.ranked is None:
        return Place(engine)
    shape, metrics = info.kv_shape, WorkerMetrics(WorkerHistograms(CollectorRegistry()))
    ucx = {"NET_DEVICES": "lo"}
    transport = await RankedTransport.begin(
        info.ranked, metrics, "models", shape.model_fingerprint, shape.block_tokens, ucx, sealed=False
    )
    return Place(engine, transport)


async def move_live(source: Place, target: Place, stream: Stream) -> bool:
    """In rounds, as between two workers; False when the request ended before it could be moved."""
    for _ in range(_TRIES):
        if stream.finished:
            return False
        try:
            if source.transport is None or target.transport is None:
                await _out_and_in(source.engine, stream)
            else:
                await _from_rank_to_rank(source, source.transport, target, target.transport, stream)
        except EngineRefusal:
            # It waits, computes its prompt, or has just ended.
            await target.engine.import_drop(stream.request_id)
            await source.engine.export_resume(stream.request_id)
        else:
            return True
    raise RuntimeError(f"{stream.request_id} could not be moved")


async def move_by_replay(source: Place, target: Place, sink: Sink, stream: Stream) -> bool:
    """Given up there, and computed anew from the tokens that came; False when it had ended."""
    if stream.finished:
        return False
    if source is not target:
        source.engine.abort([stream.key])
    stream.epoch += 1
    sink.resubmit(target.engine, stream)
    return True


async def _forget_prefixes(engine: VllmEngine) -> None:
    await engine._ask(
        lambda parts: parts.core.block_pool.evict_blocks(set(range(parts.core.block_pool.num_gpu_blocks)))
    )


async def _out_and_in(engine: VllmEngine, stream: Stream) -> None:
    """Out of the engine, and into other blocks of it. Raises EngineRefusal before it is out."""
    parts, name = _Parts(engine, stream.request_id), stream.request_id
    exported = await engine.export_open(name)
    await parts.pull(len(exported.block_hashes))
    await parts.pull(len(await engine.export_more(name, parts.blocks)))
    pause = await engine.export_pause(name, parts.blocks)
    await parts.pull(len(pause.block_hashes))
    await engine.export_release(name)
    if stream.epoch % 2:
        # Else it finds its own full blocks by name, which then stay where they are.
        await _forget_prefixes(engine)
    try:
        await engine.import_queue(exported, stream.key, stream.epoch + 1)
        await engine.import_reserve(name, parts.blocks)
        await parts.write()
        await engine.import_prepare(name, pause)
        stream.epoch += 1
        await engine.import_activate(name)
    except EngineRefusal as refusal:
        raise RuntimeError(f"{name} is lost: {refusal}") from refusal


async def _from_rank_to_rank(
    source: Place, sends: RankedTransport, target: Place, takes: RankedTransport, stream: Stream
) -> None:
    """Every rank of the target fetches from its own of the source. Raises EngineRefusal, and the request is
    still at its source."""
    name = stream.request_id
    exported = await source.engine.export_open(name)
    session = await sends.open(name, takes.addresses)
    have = 0

    async def pull(hashes: Sequence[bytes]) -> None:
        nonlocal have
        await target.engine.import_reserve(name, have + len(hashes))
        await transfer.pull(have, hashes)
        have += len(hashes)

    try:
        await target.engine.import_queue(exported, stream.key, stream.epoch + 1)
        have = target.engine.import_held(name)
        transfer = await takes.connect(name, sends.addresses, session.tickets)
        try:
            await session.announce(0, exported.block_hashes)
            await pull(exported.block_hashes[have:])
            more = await source.engine.export_more(name, have)
            await session.announce(have, more)
            await pull(more)
            pause = await source.engine.export_pause(name, have)
            await session.announce(have, pause.block_hashes)
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
