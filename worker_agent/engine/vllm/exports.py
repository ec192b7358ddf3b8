"""Source of a migration: pins blocks, pauses, hands over. Engine thread, but for `Export.block_ids`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import RequestStatus

from worker_agent.engine.base import EngineRefusal, Exported, ExportedPause
from worker_agent.engine.vllm.in_use import InUse
from worker_agent.engine.vllm.load import LoadedCore
from worker_agent.engine.vllm.requests import Entry, RequestTable


@dataclass(slots=True)
class Export:
    """One request on its way out. Its pinned blocks outlive the request, until the export ends.

    Blocks are named by content: one that was preempted and computed anew is the same block, so what is
    pinned stays right whatever becomes of the request.
    """

    entry: Entry
    reported_tokens: int
    reading: InUse
    pinned: list[KVCacheBlock] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)

    def block_ids(self, first_block: int, num_blocks: int) -> list[int]:
        """Places of pinned blocks. Any thread: the list only grows while the export is open."""
        blocks = self.pinned[first_block : first_block + num_blocks]
        if len(blocks) != num_blocks:
            raise EngineRefusal(f"blocks {first_block}..{first_block + num_blocks - 1} are not all pinned")
        return [block.block_id for block in blocks]


class Exports:
    """All exports of this engine, by request id."""

    def __init__(
        self, core: LoadedCore, table: RequestTable, post: Callable[[Callable[[], None]], None]
    ) -> None:
        """`post` runs a command on the engine thread, from any thread."""
        self._core = core
        self._table = table
        self._post = post
        self._exports: dict[str, Export] = {}

    def get(self, request_id: str) -> Export:
        """The open export. Any thread. Raises EngineRefusal."""
        export = self._exports.get(request_id)
        if export is None:
            raise EngineRefusal(f"request {request_id} is not being exported")
        return export

    def open(self, request_id: str) -> Exported:
        """Pin the full blocks there are; the request goes on."""
        if request_id in self._exports:
            raise EngineRefusal(f"request {request_id} is already being exported")
        entry = self._table.get(request_id)
        if entry is None:
            raise EngineRefusal(f"request {request_id} is not running here")
        status = entry.request.status
        if status != RequestStatus.RUNNING:
            raise EngineRefusal(f"request {request_id} is {_state(status)}")
        outputs = list(entry.request.output_token_ids)
        export = Export(entry, len(outputs), InUse(f"the export of {request_id}"))
        self._exports[request_id] = export
        self._pin_full(export)
        return Exported(
            key=entry.key,
            frontend_id=entry.frontend_id,
            epoch=entry.epoch,
            frames=entry.frames,
            output_token_ids=outputs,
            phase=entry.phases.phase,
            traceparent=entry.traceparent,
            block_hashes=list(export.hashes),
        )

    def more(self, request_id: str, have_blocks: int) -> list[bytes]:
        """Pin what has become full; hashes of all from number have_blocks on."""
        export = self._live(request_id)
        if export.entry.request.status == RequestStatus.RUNNING:
            self._pin_full(export)
        return export.hashes[have_blocks:]

    def pause(self, request_id: str, have_blocks: int) -> ExportedPause:
        """Stop stepping the request; pin all its blocks, the partial one included."""
        export = self._live(request_id)
        entry, request, scheduler = export.entry, export.entry.request, self._core.scheduler
        if request_id in scheduler.paused:
            raise EngineRefusal(f"request {request_id} is already paused")
        if request.status != RequestStatus.RUNNING:
            raise EngineRefusal(f"request {request_id} is {_state(request.status)}")
        computed = request.num_computed_tokens
        if computed != request.num_tokens - 1 or not request.num_output_tokens:
            raise EngineRefusal(f"request {request_id} is computing its prompt")
        state = self._core.generator_state(request_id)
        scheduler.pause(request)
        self._pin_full(export)
        blocks = self._core.blocks_of(request_id)
        if cdiv(computed, self._core.block_tokens) > len(export.pinned):
            self._pin(export, blocks[len(export.pinned)], b"")
        new_tokens = list(request.output_token_ids)[export.reported_tokens :]
        return ExportedPause(
            new_output_token_ids=new_tokens,
            computed_tokens=computed,
            block_hashes=export.hashes[have_blocks:],
            sampling_state=state,
            token_interval_ms=entry.pace.interval_ms,
        )

    def resume(self, request_id: str) -> None:
        """Go on as if nothing had happened; ignored when there is no export."""
        export = self._exports.pop(request_id, None)
        if export is None:
            return
        if self._table.get(request_id) is export.entry:
            self._core.scheduler.unpause(request_id)
        self._unpin(export)

    def release(self, request_id: str) -> None:
        """Free the request, which lives elsewhere now; ignored when there is no export."""
        export = self._exports.pop(request_id, None)
        if export is None:
            return
        if self._table.get(request_id) is export.entry:
            self._table.remove(export.entry)
            self._core.finish([request_id])
        self._unpin(export)

    def _live(self, request_id: str) -> Export:
        export = self.get(request_id)
        if self._table.get(request_id) is not export.entry:
            raise EngineRefusal(f"request {request_id} has finished")
        return export

    def _pin_full(self, export: Export) -> None:
        request = export.entry.request
        full = request.num_computed_tokens // self._core.block_tokens
        if full > len(export.pinned):
            blocks = self._core.blocks_of(request.request_id)
            for number in range(len(export.pinned), full):
                self._pin(export, blocks[number], bytes(request.block_hashes[number]))

    def _pin(self, export: Export, block: KVCacheBlock, block_hash: bytes) -> None:
        self._core.block_pool.touch([block])
        export.hashes.append(block_hash)
        export.pinned.append(block)

    def _unpin(self, export: Export) -> None:
        def free() -> None:
            # Last block first, so that it is evicted from the prefix cache before those it builds on.
            self._core.block_pool.free_blocks(reversed(export.pinned))

        export.reading.close(lambda: self._post(free))


def _state(status: RequestStatus) -> str:
    return "preempted" if status == RequestStatus.PREEMPTED else "waiting"
