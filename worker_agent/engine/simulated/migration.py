"""Both sides of migrations: requests that are exported, and requests that are imported."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np

from tailrace.cluster import Phase
from worker_agent.engine.base import Exported, ExportedPause, KvShape, RequestKey, Staging
from worker_agent.engine.errors import EngineRefusal, KvCorrupt, NoRoom, raised_anew
from worker_agent.engine.host_ledger import Swapped
from worker_agent.engine.import_queue import ImportQueue
from worker_agent.engine.simulated.kv import KvCodec, staged_bytes
from worker_agent.engine.simulated.request import Request, RequestReader, SimulatedRequests, State
from worker_agent.engine.simulated.scheduler import Scheduler
from worker_agent.engine.simulated.settings import SimulatedFaults

# Bytes processed before yielding to the event loop: about a millisecond of work.
YIELD_BYTES: Final = 4 << 20


class SamplingState(msgspec.Struct, array_like=True):
    """Lets the target check that it continues the request as the source would have."""

    script: bytes
    output_tokens: int


class SimulatedExports:
    """Requests being exported to other engines; `Request.exporting` tells which.

    For the methods, see those of `Engine` for the source of a migration.
    """

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


_state = msgspec.msgpack.Decoder(SamplingState)


@dataclass(slots=True)
class _ReservedImport:
    request: Request
    # The reservation, if it is in host memory.
    slots: list[int] | None
    # Number of leading blocks that were cached.
    cached: int = 0
    # Seed of each received block. A block's bytes follow from its seed, so nothing else is stored.
    seeds: dict[int, int] = field(default_factory=dict)
    prepared: bool = False

    @property
    def reserved(self) -> int:
        """Return the number of reserved blocks."""
        return len(self.request.blocks if self.slots is None else self.slots)


class SimulatedImports:
    """Requests being imported from other engines.

    For the methods, see those of `Engine` for the target of a migration.
    """

    def __init__(
        self,
        table: SimulatedRequests,
        scheduler: Scheduler,
        reader: RequestReader,
        codec: KvCodec,
        shape: KvShape,
        faults: SimulatedFaults,
    ) -> None:
        self._table = table
        self._scheduler = scheduler
        self._reader = reader
        self._codec = codec
        self._shape = shape
        self._faults = faults
        self._imports: dict[str, _ReservedImport] = {}
        # Imports that wait for room; `admit` is called before each step.
        self.waiting = ImportQueue()

    def check_replay(self, exported: Exported, key: RequestKey) -> None:
        request = self._request(exported, key, exported.epoch)
        scheduler, pool = self._scheduler, self._scheduler.pool
        blocks = min(pool.blocks_for(request.total) + 1, pool.total)
        if scheduler.free_slots < 1 or pool.free < blocks:
            raise NoRoom(f"{blocks} KV blocks and a batch slot are needed")

    def open(self, exported: Exported, key: RequestKey, epoch: int) -> None:
        request = self._request(exported, key, epoch)
        if self.waiting:
            raise NoRoom(f"{len(self.waiting)} imports wait for room")
        self._reserve_import(request, exported)

    async def queue(self, exported: Exported, key: RequestKey, epoch: int) -> None:
        request = self._request(exported, key, epoch)
        has_room: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def done(refusal: EngineRefusal | None) -> None:
            if has_room.cancelled():
                return
            if refusal is None:
                has_room.set_result(None)
            else:
                has_room.set_exception(refusal)

        self.waiting.add(request.request_id, key, lambda: self._reserve_import(request, exported), done)
        self.waiting.admit()
        try:
            await has_room
        except EngineRefusal as refusal:
            raise raised_anew(refusal) from None

    def cached(self, request_id: str) -> int:
        return self._importing(request_id).cached

    def reserve(self, request_id: str, num_blocks: int) -> None:
        incoming = self._importing(request_id)
        request, pool = incoming.request, self._scheduler.pool
        if incoming.slots is not None:
            slots = self._scheduler.host.allocate(max(0, num_blocks - len(incoming.slots)))
            if slots is None:
                raise EngineRefusal(f"{num_blocks} blocks of host memory are needed")
            incoming.slots += slots
            return
        if not pool.grow(request.blocks, num_blocks):
            raise EngineRefusal(f"{num_blocks} KV blocks are needed and {pool.free} more free")

    async def write(
        self, request_id: str, first_block: int, num_blocks: int, received: Staging, checksums: Sequence[int]
    ) -> None:
        incoming = self._importing(request_id)
        first, last = incoming.cached, incoming.reserved
        if first_block < first or first_block + num_blocks > last:
            raise EngineRefusal(f"{request_id}: blocks {first} to {last} may be written")
        if len(checksums) != num_blocks:
            raise KvCorrupt(f"{len(checksums)} checksums for {num_blocks} blocks")
        size = self._codec.block_bytes
        data = staged_bytes(received.buffer, num_blocks * size)
        chunk_blocks = max(1, YIELD_BYTES // size)
        seeds: list[int] = []
        for start in range(0, num_blocks, chunk_blocks):
            if start:
                await asyncio.sleep(0)
            end = min(start + chunk_blocks, num_blocks)
            part = data[start * size : end * size]
            seeds += self._codec.read(part, checksums[start:end], first_block + start).tolist()
        if self._imports.get(request_id) is not incoming:
            raise EngineRefusal(f"request {request_id} was dropped while its blocks were written")
        incoming.seeds.update(enumerate(seeds, first_block))

    def prepare(self, request_id: str, pause: ExportedPause) -> None:
        incoming = self._importing(request_id)
        request = incoming.request
        outputs = [*request.outputs, *pause.new_output_token_ids]
        check_state(request, len(outputs), pause.sampling_state)
        request.outputs += pause.new_output_token_ids
        request.total = len(request.prompt) + len(outputs)
        if not 0 <= pause.computed_tokens < request.total:
            raise EngineRefusal(f"KV of {pause.computed_tokens} tokens, of {request.total}")
        if request.reasoning_end is None and request.reasons:
            end = request.script.end_think_at
            request.reasoning_end = end if 0 <= end < len(outputs) else None
        if outputs and pause.computed_tokens == request.total - 1:
            request.phase = request.decode_phase
        if request.phase is Phase.ANSWERING:
            request.turn.start_answering(time.time(), pause.answering_for_s)

        blocks = self._scheduler.pool.blocks_for(pause.computed_tokens)
        expected = request.chain.seeds(0, blocks, pause.computed_tokens)
        missing = [block for block in range(blocks) if block not in incoming.seeds]
        if missing:
            raise KvCorrupt(f"block {missing[0]} of {request_id} was never received")
        received = np.fromiter((incoming.seeds[block] for block in range(blocks)), np.uint64, blocks)
        wrong = np.flatnonzero(expected != received)
        if wrong.size:
            raise KvCorrupt(f"block {int(wrong[0])} does not match the tokens of {request_id}")
        request.computed = pause.computed_tokens
        incoming.prepared = True

    def activate(self, request_id: str) -> None:
        incoming = self._importing(request_id)
        if not incoming.prepared:
            raise EngineRefusal(f"the import of {request_id} is not prepared")
        del self._imports[request_id]
        if incoming.slots is not None:
            self._register_swapped(incoming.request, incoming.slots)
        self._scheduler.run(incoming.request)

    def discard(self, request: Request) -> None:
        """Forget the import of a request that is dropped or aborted, if there is one."""
        incoming = self._imports.pop(request.request_id, None)
        if incoming is not None and incoming.slots is not None:
            self._scheduler.host.release(incoming.slots)

    def find(self, request_id: str) -> Request | None:
        """Return the request if it is being imported."""
        incoming = self._imports.get(request_id)
        return None if incoming is None else incoming.request

    def _request(self, exported: Exported, key: RequestKey, epoch: int) -> Request:
        """Decode the request. Raise EngineRefusal if this engine could not run it."""
        if self._faults.refuse_import is not None:
            raise EngineRefusal(self._faults.refuse_import)
        request = self._reader.read(
            key,
            epoch,
            exported.frames,
            exported.output_token_ids,
            exported.frontend_id,
            exported.traceparent,
        )
        request_id = request.request_id
        known = self._table.by_id(request_id) is not None or request_id in self.waiting
        if known or self._table.by_key(key) is not None:
            raise EngineRefusal(f"request {request_id} is on this engine already")
        return request

    def _reserve_import(self, request: Request, exported: Exported) -> None:
        """Reserve room and register the import. Raise NoRoom."""
        incoming = self._reserve_blocks(request, exported.block_hashes)
        request.phase = exported.phase
        self._scheduler.hold(request, State.IMPORTING)
        self._table.add(request)
        self._imports[request.request_id] = incoming

    def _reserve_blocks(self, request: Request, names: Sequence[bytes]) -> _ReservedImport:
        """Reserve blocks of the device, starting with those cached under these names, or slots of host
        memory. Raise NoRoom."""
        scheduler, pool = self._scheduler, self._scheduler.pool
        blocks = min(pool.blocks_for(request.total) + 1, pool.total)
        if scheduler.free_slots > 0 and blocks <= pool.free:
            cached = pool.take_named(request.blocks, names) if scheduler.prefix_caching else 0
            pool.grow(request.blocks, blocks)
            # Treat cached blocks as received, so that their content is verified with the others.
            seeds = {number: int.from_bytes(names[number][:8], "little") for number in range(cached)}
            return _ReservedImport(request, None, cached, seeds)
        if scheduler.intra is not None and scheduler.intra.receives_on_host:
            slots = scheduler.host.allocate(blocks)
            if slots is not None:
                return _ReservedImport(request, slots)
        if scheduler.free_slots < 1:
            raise NoRoom("the batch is full")
        raise NoRoom(f"{blocks} KV blocks are needed and {pool.free} free")

    def _register_swapped(self, request: Request, slots: list[int]) -> None:
        """Register the request as swapped out, and release the slots it does not need."""
        used = self._scheduler.pool.blocks_for(request.computed)
        self._scheduler.host.release(slots[used:])
        swapped = Swapped(request.computed, slots[:used], [b""] * used)
        self._scheduler.host.add_import(request.request_id, swapped)

    def _importing(self, request_id: str) -> _ReservedImport:
        incoming = self._imports.get(request_id)
        if incoming is None:
            raise EngineRefusal(f"request {request_id} is not being imported")
        return incoming


def check_state(request: Request, output_tokens: int, sampling_state: bytes) -> None:
    """Check that the request continues here as it would have at its source. Raise EngineRefusal."""
    try:
        state = _state.decode(sampling_state)
    except msgspec.DecodeError as error:
        raise EngineRefusal(f"sampling state: {error}") from error
    if state.script != request.script.identity:
        raise EngineRefusal("the source would continue differently: another prompt, seed or model")
    if state.output_tokens != output_tokens:
        raise EngineRefusal(f"{output_tokens} output tokens handed over, {state.output_tokens} generated")
