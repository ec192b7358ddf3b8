"""Source side of migrations."""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec

from worker_agent.engine.base import Exported, ExportedPause, KvShape, Staging
from worker_agent.engine.errors import EngineRefusal
from worker_agent.engine.simulated.kv import KvCodec, staged_bytes
from worker_agent.engine.simulated.request import Request, SimulatedRequests, State
from worker_agent.engine.simulated.scheduler import Scheduler
from worker_agent.engine.simulated.settings import SimulatedFaults

# Bytes processed before yielding to the event loop: about a millisecond of work.
YIELD_BYTES: Final = 4 << 20


class SamplingState(msgspec.Struct, array_like=True):
    """Lets the target check that it continues the request as the source would have."""

    script: bytes
    output_tokens: int


class SimulatedExports:
    """Requests being exported to other engines; `Request.exporting` tells which."""

    def __init__(
        self,
        table: SimulatedRequests,
        scheduler: Scheduler,
        codec: KvCodec,
        shape: KvShape,
        replay_reason: str,
        faults: SimulatedFaults,
    ) -> None:
        self._table = table
        self._scheduler = scheduler
        self._codec = codec
        self._shape = shape
        self._replay_reason = replay_reason
        self._faults = faults

    def open(self, request_id: str) -> Exported:
        """Engine.export_open."""
        request = self._table.known(request_id)
        if request.state is not State.RUNNING and not self._scheduler.on_host(request):
            raise EngineRefusal(f"request {request_id} is {request.state.value}, not running")
        if request.exporting:
            raise EngineRefusal(f"request {request_id} is being exported already")
        request.exported_outputs = len(request.outputs)
        return Exported(
            key=request.key,
            frontend_id=request.frontend_id,
            epoch=request.epoch,
            frames=request.frames,
            output_token_ids=list(request.outputs),
            phase=request.phase,
            traceparent=request.traceparent,
            block_hashes=[] if self._replay_reason else request.chain.full(0, self._full_blocks(request)),
            replay_reason=self._replay_reason,
        )

    def more(self, request_id: str, have_blocks: int) -> list[bytes]:
        """Engine.export_more."""
        request = self._exporting(request_id)
        return request.chain.full(have_blocks, self._full_blocks(request))

    def pause(
        self, request_id: str, have_blocks: int, token_interval_ms: float, waited_s: float
    ) -> ExportedPause:
        """Engine.export_pause, between two steps."""
        request = self._pause_request(request_id)
        hashes = request.chain.full(have_blocks, self._full_blocks(request))
        if request.computed % self._shape.block_tokens:
            hashes.append(b"")
        return self._paused(request, hashes, token_interval_ms, waited_s)

    def stop(self, request_id: str, token_interval_ms: float, waited_s: float) -> ExportedPause:
        """Engine.export_stop, between two steps."""
        return self._paused(self._pause_request(request_id), [], token_interval_ms, waited_s)

    def _pause_request(self, request_id: str) -> Request:
        request = self._exporting(request_id)
        if request.state is State.PAUSED:
            raise EngineRefusal(f"request {request_id} is paused already")
        self._scheduler.hold(request, State.PAUSED)
        return request

    @staticmethod
    def _paused(
        request: Request, hashes: list[bytes], token_interval_ms: float, waited_s: float
    ) -> ExportedPause:
        return ExportedPause(
            new_output_token_ids=request.outputs[request.exported_outputs :],
            computed_tokens=request.computed,
            block_hashes=hashes,
            sampling_state=msgspec.msgpack.encode(
                SamplingState(request.script.identity, len(request.outputs))
            ),
            token_interval_ms=token_interval_ms,
            waited_s=waited_s,
        )

    def resume(self, request_id: str) -> None:
        """Engine.export_resume; a request that has ended is ignored."""
        request = self._table.by_id(request_id)
        if request is None or not request.exporting:
            return
        request.exported_outputs = None
        if request.state is State.PAUSED:
            self._scheduler.run(request)

    async def read(self, request_id: str, first_block: int, num_blocks: int, out: Staging) -> list[int]:
        """Engine.read_blocks."""
        request = self._exporting(request_id)
        last = first_block + num_blocks
        readable = self._full_blocks(request)
        tokens = readable * self._shape.block_tokens
        if request.state is State.PAUSED:
            tokens = request.computed
            readable = self._scheduler.pool.blocks_for(tokens)
        if first_block < 0 or num_blocks < 1 or last > readable:
            raise EngineRefusal(f"blocks [{first_block}, {last}) of {readable} that can be read")
        seeds = request.chain.seeds(first_block, last, tokens)
        wrong = self._faults.send_wrong_block
        if wrong is not None and first_block <= wrong < last:
            seeds = seeds.copy()
            seeds[wrong - first_block] ^= 1

        size = self._codec.block_bytes
        data = staged_bytes(out.buffer, num_blocks * size)
        chunk_blocks = max(1, YIELD_BYTES // size)
        checksums: list[int] = []
        for start in range(0, num_blocks, chunk_blocks):
            if start:
                await asyncio.sleep(0)
            end = min(start + chunk_blocks, num_blocks)
            checksums += self._codec.write(seeds[start:end], data[start * size : end * size])
        flipped = self._faults.flip_bit_in_block
        if flipped is not None and first_block <= flipped < last:
            data[(flipped - first_block) * size + size // 2] ^= 1
        return checksums

    def _exporting(self, request_id: str) -> Request:
        request = self._table.known(request_id)
        if not request.exporting:
            raise EngineRefusal(f"request {request_id} is {request.state.value} and no longer exported")
        return request

    def _full_blocks(self, request: Request) -> int:
        return request.computed // self._shape.block_tokens
