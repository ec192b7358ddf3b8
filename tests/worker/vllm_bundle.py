"""A request in transit from one vLLM engine to another, or back to the same one."""

from __future__ import annotations

from tests.worker.vllm_front import Front, Stream
from worker_agent.engine.base import Exported, ExportedPause
from worker_agent.engine.vllm.engine import VllmEngine
from worker_agent.engine.vllm.kv_blocks import DeviceStaging


class Bundle:
    """An exported request: the state and blocks that a target receives from the source."""

    def __init__(self, engine: VllmEngine, request_id: str) -> None:
        self.engine = engine
        self.request_id = request_id
        self.parts: list[tuple[int, int, DeviceStaging, list[int]]] = []
        self.have = 0
        self.exported: Exported
        self.pause: ExportedPause

    async def pull(self, num_blocks: int) -> None:
        """Read the source's next blocks."""
        if num_blocks:
            staging = self.engine.staging(num_blocks)
            assert isinstance(staging, DeviceStaging)
            sums = await self.engine.read_blocks(self.request_id, self.have, num_blocks, staging)
            self.parts.append((self.have, num_blocks, staging, sums))
            self.have += num_blocks

    async def open(self) -> None:
        self.exported = await self.engine.export_open(self.request_id)
        await self.pull(len(self.exported.block_hashes))

    async def more(self) -> None:
        await self.pull(len(await self.engine.export_more(self.request_id, self.have)))

    async def stop_and_copy(self) -> None:
        self.pause = await self.engine.export_pause(self.request_id, self.have)
        await self.pull(len(self.pause.block_hashes))

    async def reserve(self, stream: Stream) -> None:
        """Open the import of the stream's next epoch and reserve all its blocks, none of them cached."""
        await forget_prefixes(self.engine)
        await self.engine.import_open(self.exported, stream.key, stream.epoch + 1)
        await self.engine.import_reserve(self.request_id, self.have)

    async def write(self) -> None:
        """Write all blocks that the target does not have in its cache."""
        held = self.engine.import_cached(self.request_id)
        for first, number, staging, sums in self.parts:
            skip = min(max(0, held - first), number)
            if skip < number:
                rest = staging.part(skip, number - skip)
                await self.engine.write_blocks(
                    self.request_id, first + skip, number - skip, rest, sums[skip:]
                )

    async def put_back(self, stream: Stream) -> None:
        """Release the request at the source and import it into the same engine."""
        await self.engine.export_release(self.request_id)
        await self.bring_in(stream)

    async def bring_in(self, stream: Stream) -> None:
        """Import and run the request as the stream's next epoch."""
        await self.reserve(stream)
        await self.write()
        await self.engine.import_prepare(self.request_id, self.pause)
        stream.epoch += 1
        await self.engine.import_activate(self.request_id)


async def forget_prefixes(engine: VllmEngine) -> None:
    """Clear the engine's prefix cache."""
    await engine._run(
        lambda parts: parts.core.block_pool.evict_blocks(set(range(parts.core.block_pool.num_gpu_blocks)))
    )


async def take_out(engine: VllmEngine, front: Front, stream: Stream, at: int) -> Bundle:
    """Export a request in rounds up to the pause, beginning at `at` tokens."""
    bundle = Bundle(engine, stream.request_id)
    await front.until_tokens(stream, at)
    await bundle.open()
    await front.until_tokens(stream, at + 5)
    await bundle.more()
    await bundle.stop_and_copy()
    assert stream.tokens == [*bundle.exported.output_token_ids, *bundle.pause.new_output_token_ids]
    return bundle
