"""Target side of migrations: reserve room, receive KV, rebuild the request, run it.

Engine thread, except where noted. The reservation is on the device or, if that is full and the current policy
lets answering requests wait, in host memory: the request then enters as if it had been swapped out.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request, RequestStatus

from tailrace.cluster import Phase
from worker_agent.engine.base import Exported, ExportedPause, RequestKey
from worker_agent.engine.errors import EngineRefusal, KvCorrupt, NoRoom
from worker_agent.engine.host_ledger import Swapped
from worker_agent.engine.import_queue import ImportQueue
from worker_agent.engine.vllm.host_pool import kv_names
from worker_agent.engine.vllm.kv_blocks import DeviceStaging
from worker_agent.engine.vllm.load import LoadedCore
from worker_agent.engine.vllm.phases import PhaseTracker
from worker_agent.engine.vllm.pinned import InUse
from worker_agent.engine.vllm.requests import LengthPrediction, Pace, VllmRequest, VllmRequests

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class ReservedImport:
    """One request being imported.

    `places` is its reservation: block IDs on the device or slots of host memory. As it grows, the list is
    replaced, never changed. Only the first `settled` transferred blocks have their final places (None: all).
    Later ones are buffered in `later` until the request's last token is known, because its sliding windows
    and recurrent state depend on it.

    The first `cached` places are blocks of the prefix cache, possibly shared, and must not be written.
    """

    exported: Exported
    key: RequestKey
    epoch: int
    request: Request
    places: list[int]
    on_host: bool
    writing: InUse
    written: set[int]
    cached: int = 0
    settled: int | None = None
    later: list[tuple[int, DeviceStaging]] = field(default_factory=list)
    prepared: VllmRequest | None = None

    def write(
        self,
        core: LoadedCore,
        first_block: int,
        num_blocks: int,
        received: DeviceStaging,
        checksums: Sequence[int],
    ) -> None:
        """Verify received blocks and store them. Any thread, inside `writing`.

        Raises EngineRefusal, or KvCorrupt without having written anything.
        """
        places = self.settled_places(first_block, num_blocks)
        now = len(places)
        core.kv.verify(received, checksums, first_block)
        if now < num_blocks:
            self.later.append((first_block + now, received.part(now, num_blocks - now).copy()))
        if self.on_host:
            # They are named when the tokens are known.
            assert core.host_pool is not None
            core.host_pool.put(places, received, checksums, [b""] * num_blocks)
        elif now:
            core.kv.scatter(received, places)
        self.written.update(range(first_block, first_block + num_blocks))

    def settled_places(self, first_block: int, num_blocks: int) -> list[int]:
        """Return the places of these blocks, as far as they are final. Any thread. Raises EngineRefusal."""
        if first_block < self.cached:
            raise EngineRefusal(f"the first {self.cached} blocks are already here")
        now = num_blocks if self.settled is None else max(0, min(num_blocks, self.settled - first_block))
        places = self.places[first_block : first_block + now]
        if len(places) != now:
            raise EngineRefusal(f"blocks {first_block}..{first_block + num_blocks - 1} are not all reserved")
        return places

    @contextmanager
    def receiving(self, first_block: int, num_blocks: int) -> Iterator[list[int]]:
        """Context in which the engine's ranks write these blocks. Yields the places that are final. Raises
        EngineRefusal."""
        with self.writing:
            yield self.settled_places(first_block, num_blocks)
            self.written.update(range(first_block, first_block + num_blocks))


class VllmImports:
    """All imports of this engine, by request ID. Each holds KV blocks and a slot of the batch, or host
    memory."""

    def __init__(
        self, core: LoadedCore, table: VllmRequests, post: Callable[[Callable[[], None]], None]
    ) -> None:
        """`post` runs a command on the engine thread, from any thread."""
        self._core = core
        self._table = table
        self._post = post
        self._imports: dict[str, ReservedImport] = {}
        self._queue = ImportQueue()

    def find(self, request_id: str) -> ReservedImport | None:
        """Return the open import, or None. Any thread."""
        return self._imports.get(request_id)

    def get(self, request_id: str) -> ReservedImport:
        """Return the open import. Any thread. Raises EngineRefusal if there is none."""
        found = self._imports.get(request_id)
        if found is None:
            raise EngineRefusal(f"request {request_id} is not being imported")
        return found

    def check_replay(self, exported: Exported, key: RequestKey) -> None:
        """Check that the request could be recomputed here now. Raises EngineRefusal, NoRoom."""
        request = self._request(exported, key)
        tokens = request.num_tokens + len(exported.output_token_ids)
        blocks = min(cdiv(tokens, self._core.block_tokens) + 1, self._core.max_blocks)
        if self._core.scheduler.free_slots() < 1 or self._core.block_pool.get_num_free_blocks() < blocks:
            raise NoRoom(f"no room: {blocks} KV blocks or a place in the batch are not free")

    def open(self, exported: Exported, key: RequestKey, epoch: int) -> None:
        """Reserve blocks for the request's tokens and one block more, and a slot of the batch.

        Raises EngineRefusal, NoRoom.
        """
        request = self._request(exported, key)
        if self._queue:
            raise NoRoom(f"no room: {len(self._queue)} imports wait for it")
        self._reserve_import(request, exported, key, epoch)
        try:
            self._start_grammar(request)
        except EngineRefusal:
            self.drop(request.request_id)
            raise

    def queue(
        self,
        exported: Exported,
        key: RequestKey,
        epoch: int,
        done: Callable[[EngineRefusal | None], None],
    ) -> None:
        """Like `open`, but wait for room behind the imports that queued before; `done` gets the result."""
        request = self._request(exported, key)
        self._start_grammar(request)
        self._queue.add(
            request.request_id, key, lambda: self._reserve_import(request, exported, key, epoch), done
        )
        self._queue.admit()

    def admit(self) -> None:
        """Give room to imports that wait for it. Call between two steps."""
        self._queue.admit()

    def reserve(self, request_id: str, num_blocks: int) -> None:
        """Grow the reservation to this many blocks. Raises EngineRefusal, leaving it as it is, if there is no
        room."""
        found = self.get(request_id)
        self._grow(found, num_blocks)

    def prepare(
        self, request_id: str, pause: ExportedPause, done: Callable[[EngineRefusal | KvCorrupt | None], None]
    ) -> None:
        """Rebuild the request once its grammar, if any, is compiled; `done` gets the result."""
        found = self.get(request_id)

        def finish(refusal: EngineRefusal | None) -> None:
            if refusal is None and self._imports.get(request_id) is not found:
                refusal = EngineRefusal(f"the import of {request_id} has ended")
            if refusal is not None:
                done(refusal)
                return
            try:
                self._rebuild(found, pause)
            except (EngineRefusal, KvCorrupt) as error:
                done(error)
            # Nothing that a source sends may end the engine.
            except Exception as error:  # noqa: BLE001
                _log.exception("request %s cannot be rebuilt", request_id)
                done(EngineRefusal(f"it cannot be rebuilt: {error}"))
            else:
                done(None)

        self._core.grammars.when_ready(found.request, finish)

    def activate(self, request_id: str) -> None:
        """Add the request to the scheduler: it decodes from the next step on. Raises EngineRefusal."""
        found = self.get(request_id)
        if found.prepared is None:
            raise EngineRefusal(f"the import of {request_id} is not prepared")
        del self._imports[request_id]
        found.writing.close(_nothing)
        if found.on_host:
            self._register_swapped(found)
        else:
            self._core.scheduler.reserve_slots(-1)
        self._table.add(found.prepared)
        self._core.scheduler.add_request(found.request)

    def drop(self, request_id: str) -> None:
        """Free the reservation after the last write into it has ended, or stop waiting for room; unknown
        requests are ignored."""
        self._queue.remove(request_id)
        found = self._imports.pop(request_id, None)
        if found is None:
            return
        if request_id in self._core.scheduler.adopted:
            self._core.forget(request_id)
        if found.on_host:
            found.writing.close(lambda: self._post(lambda: self._core.host.release(found.places)))
            return
        self._core.scheduler.reserve_slots(-1)
        blocks = self._core.kv_manager.pop_blocks_for_free(found.request)

        def free() -> None:
            self._core.block_pool.free_blocks(reversed(blocks))

        found.writing.close(lambda: self._post(free))

    def drop_key(self, key: RequestKey) -> None:
        """Drop the import with this key, if any."""
        self._queue.remove_key(key)
        for request_id in [name for name, found in self._imports.items() if found.key == key]:
            self.drop(request_id)

    def drop_client(self, client: int) -> None:
        """Drop every import for this front end."""
        self._queue.remove_client(client)
        for request_id in [name for name, found in self._imports.items() if found.key.client == client]:
            self.drop(request_id)

    # ---- inner

    def _request(self, exported: Exported, key: RequestKey) -> Request:
        """Decode the request. Raises EngineRefusal if this engine could not run it."""
        request = self._core.decode(exported.frames, key.client, exported.adapter_version)
        request_id = request.request_id
        known = request_id in self._imports or request_id in self._queue
        if known or self._table.get(request_id) is not None:
            raise EngineRefusal(f"request {request_id} is here already")
        if request.num_tokens + len(exported.output_token_ids) >= self._core.max_model_len:
            raise EngineRefusal(f"request {request_id} is longer than this engine's max_model_len")
        # An earlier request with this ID may still have blocks that are being loaded from host memory.
        self._core.drain_load(request_id)
        return request

    def _reserve_import(self, request: Request, exported: Exported, key: RequestKey, epoch: int) -> None:
        """Reserve room and register the import. Raises NoRoom."""
        tokens = request.num_tokens + len(exported.output_token_ids)
        cached = self._find_cached(request, exported)
        places, on_host = self._reserve_places(request, tokens, cached)
        plain, num_cached = self._core.layout.plain, 0 if on_host else len(cached)
        self._imports[request.request_id] = ReservedImport(
            exported=exported,
            key=key,
            epoch=epoch,
            request=request,
            places=places,
            on_host=on_host,
            writing=InUse(f"the import of {request.request_id}"),
            written=set(range(num_cached)),
            cached=num_cached,
            settled=None if plain else min(len(exported.block_hashes), len(places)),
        )

    def _start_grammar(self, request: Request) -> None:
        """Start to compile the request's grammar, which takes place during the transfer."""
        try:
            self._core.start_grammar(request)
        except ValueError as error:
            raise EngineRefusal(f"its grammar cannot be compiled here: {error}") from error

    def _find_cached(self, request: Request, exported: Exported) -> list[KVCacheBlock]:
        """Return the request's first blocks that the prefix cache has, unless it must not read the cache."""
        if request.skip_reading_prefix_cache:
            return []
        return self._core.find_on_device(exported.block_hashes)

    def _reserve_places(
        self, request: Request, tokens: int, cached: Sequence[KVCacheBlock]
    ) -> tuple[list[int], bool]:
        """Reserve places for the request's tokens and one block more; return them, and whether they are in
        host memory. On the device, the first ones are `cached`. Raises NoRoom."""
        blocks = min(cdiv(tokens, self._core.block_tokens) + 1, self._core.max_blocks)
        if self._core.scheduler.free_slots() > 0 and self._reserve_blocks(request, blocks, tokens, cached):
            self._core.scheduler.reserve_slots(1)
            return self._places(request.request_id), False
        # vLLM does not swap in requests that must not read the cache.
        waits = self._core.intra is not None and self._core.intra.receives_on_host
        if waits and not request.skip_reading_prefix_cache:
            slots = self._core.host.allocate(blocks)
            if slots is not None:
                return slots, True
        raise NoRoom(f"no room: {blocks} KV blocks or a place in the batch are not free")

    def _reserve_blocks(
        self, request: Request, blocks: int, tokens: int, cached: Sequence[KVCacheBlock]
    ) -> bool:
        """Reserve a new request's blocks; return False or raise NoRoom without room. None are reserved then,
        whatever is raised."""
        core = self._core
        try:
            if core.layout.plain:
                return core.reserve(request, blocks, cached)
            return core.reserve_for(request, tokens - 1, cached)
        except Exception:
            core.block_pool.free_blocks(reversed(core.kv_manager.pop_blocks_for_free(request)))
            raise

    def _grow(self, found: ReservedImport, num_blocks: int) -> None:
        missing = num_blocks - len(found.places)
        if missing <= 0:
            return
        if found.settled is not None:
            # The reservation grows when the last token is known. Until then, this bounds what is buffered.
            if num_blocks > len(self._core.layout.positions(self._core.max_model_len)):
                raise EngineRefusal(f"{num_blocks} KV blocks are more than a request can have here")
            return
        if num_blocks <= self._core.max_blocks:
            if found.on_host:
                slots = self._core.host.allocate(missing)
                if slots is not None:
                    found.places = [*found.places, *slots]
                    return
            elif self._core.reserve(found.request, num_blocks):
                found.places = self._places(found.request.request_id)
                return
        raise EngineRefusal(f"no room: {missing} more KV blocks are not free")

    def _places(self, request_id: str) -> list[int]:
        return [block.block_id for block in self._core.blocks_of(request_id)]

    def _rebuild(self, found: ReservedImport, pause: ExportedPause) -> None:
        request = found.request
        if found.prepared is not None:
            raise EngineRefusal(f"the import of {request.request_id} is already prepared")
        outputs = [*found.exported.output_token_ids, *pause.new_output_token_ids]
        computed = request.num_prompt_tokens + len(outputs) - 1
        if not outputs or pause.computed_tokens != computed:
            raise EngineRefusal(f"KV of {pause.computed_tokens} tokens does not fit {len(outputs)} outputs")
        used = len(self._core.layout.positions(computed))
        missing = set(range(used)) - found.written
        if missing:
            raise EngineRefusal(f"{len(missing)} KV blocks have not arrived")
        if found.settled is None:
            self._grow(found, cdiv(computed + 1, self._core.block_tokens))
        self._core.append_outputs(request, outputs)
        self._check_hashes(request, 0, found.exported.block_hashes)
        self._check_hashes(request, used - len(pause.block_hashes), pause.block_hashes)
        if found.settled is not None:
            self._settle(found, computed)
        request.status = RequestStatus.PREEMPTED
        if found.on_host:
            self._set_names(found, computed)
        else:
            request.num_computed_tokens = computed
        self._core.adopt(request, pause.sampling_state)
        if not found.on_host:
            self._core.kv_manager.cache_blocks(request, computed)
        phases = PhaseTracker(self._core.marks, request.prompt_token_ids or ())
        phases.replay(outputs)
        turn = self._table.new_turn(request)
        if phases.phase is Phase.ANSWERING:
            turn.start_answering(time.time(), pause.answering_for_s)
        found.prepared = VllmRequest(
            key=found.key,
            request_id=request.request_id,
            epoch=found.epoch,
            frames=found.exported.frames,
            adapter_version=self._core.adapters.version_of(request.lora_request),
            frontend_id=found.exported.frontend_id,
            traceparent=found.exported.traceparent,
            request=request,
            phases=phases,
            pace=Pace(pause.token_interval_ms),
            emitted=len(outputs),
            turn=turn,
            prediction=_prediction(pause, len(outputs)),
        )

    def _settle(self, found: ReservedImport, computed: int) -> None:
        """Write the buffered blocks to their final places, now that the last token is known."""
        core, request = self._core, found.request
        request.num_computed_tokens = computed
        if not core.extend(request):
            raise EngineRefusal("no room: its last KV blocks are not free")
        positions = core.layout.positions(computed)
        ids = [block.block_id for block in core.blocks_at(request.request_id, positions)]
        if core.ranked:
            core.settle_ranks(request.request_id, ids)
        for first, staging in found.later:
            core.kv.scatter(staging, ids[first : first + len(staging.bytes)])
        found.later = []

    def _set_names(self, found: ReservedImport, computed: int) -> None:
        """Name the received blocks in host memory, now that the tokens are known."""
        pool = self._core.host_pool
        assert pool is not None
        for slot, name in zip(
            found.places, kv_names(found.request, computed, self._core.block_tokens), strict=False
        ):
            pool.set_name(slot, name)

    def _register_swapped(self, found: ReservedImport) -> None:
        """Register the request as swapped out, and release the slots it does not need."""
        computed = found.request.num_tokens - 1
        names = kv_names(found.request, computed, self._core.block_tokens)
        used = found.places[: len(names)]
        self._core.host.release(found.places[len(names) :])
        self._core.host.add_import(found.request.request_id, Swapped(computed, used, names))

    def _check_hashes(self, request: Request, first_block: int, hashes: Sequence[bytes]) -> None:
        """Raise KvCorrupt unless the source's names of full blocks match their tokens here."""
        for number, name in enumerate(hashes, first_block):
            if name and name != self._core.block_name(request, number):
                raise KvCorrupt(f"block {number}: its tokens do not match the transferred KV")


def _prediction(pause: ExportedPause, emitted: int) -> LengthPrediction | None:
    """Return the source's prediction, which counts down until this engine makes its own."""
    remaining = pause.predicted_remaining_tokens
    return None if remaining is None else LengthPrediction(emitted, remaining)


def _nothing() -> None:
    return
