"""A request taken out of an engine and brought back: live, with all its state, or by replay."""

from __future__ import annotations

from benchmarks.models.sink import Sink, Stream
from worker_agent.engine.base import EngineRefusal, Exported, ExportedPause, Staging
from worker_agent.engine.vllm.engine import VllmEngine

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
        """Write all of them into the import."""
        for first, number, staging, sums in self._parts:
            await self._engine.write_blocks(self._request_id, first, number, staging, sums)


async def move_live(engine: VllmEngine, stream: Stream) -> bool:
    """In rounds, as between two workers; False when the request ended before it could be moved."""
    taken = await _take_out(engine, stream)
    if taken is None:
        return False
    exported, pause, parts = taken
    await engine.export_release(stream.request_id)
    await engine.import_queue(exported, stream.key, stream.epoch + 1)
    await engine.import_reserve(stream.request_id, parts.blocks)
    await parts.write()
    await engine.import_prepare(stream.request_id, pause)
    stream.epoch += 1
    await engine.import_activate(stream.request_id)
    return True


async def move_by_replay(engine: VllmEngine, sink: Sink, stream: Stream) -> bool:
    """Given up here, and computed anew from the tokens that came; False when it had ended."""
    if stream.finished:
        return False
    stream.epoch += 1
    sink.resubmit(engine, stream)
    return True


async def _take_out(engine: VllmEngine, stream: Stream) -> tuple[Exported, ExportedPause, _Parts] | None:
    for _ in range(_TRIES):
        if stream.finished:
            return None
        parts = _Parts(engine, stream.request_id)
        try:
            exported = await engine.export_open(stream.request_id)
            await parts.pull(len(exported.block_hashes))
            await parts.pull(len(await engine.export_more(stream.request_id, parts.blocks)))
            pause = await engine.export_pause(stream.request_id, parts.blocks)
            await parts.pull(len(pause.block_hashes))
        except EngineRefusal:
            # It waits, computes its prompt, or has just ended.
            await engine.export_resume(stream.request_id)
            continue
        return exported, pause, parts
    raise RuntimeError(f"{stream.request_id} could not be moved")
