"""Source side of migrations: pin blocks, pause, hand over. Engine thread, except for reading.

With async scheduling, vLLM may begin a step before it has the tokens of the last one. Blocks that a step in
flight computes are not pinned yet, and a pause is complete when the request's own steps in flight have ended;
steps continue for other requests.

A request that is swapped out is handed over from host memory. If it is swapped out or in while its export is
open, some of its blocks are pinned on the device and some in host memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from vllm.v1.request import RequestStatus

from tailrace.handover import TransferMode
from worker_agent.engine.base import Exported, ExportedPause
from worker_agent.engine.errors import EngineRefusal, Gone
from worker_agent.engine.vllm.host_pool import HostSlot
from worker_agent.engine.vllm.layouts import BlockPosition
from worker_agent.engine.vllm.load import LoadedCore
from worker_agent.engine.vllm.pinned import InUse, Pinned
from worker_agent.engine.vllm.requests import VllmRequest, VllmRequests
from worker_agent.engine.vllm.scheduler import decodes

PauseDone = Callable[[ExportedPause | EngineRefusal], None]


@dataclass(slots=True, kw_only=True)
class PinnedExport(Pinned):
    """A request being exported. Its blocks stay pinned until the export ends, even if the request ends first.

    Blocks are named by content, and recomputing a preempted request yields the same blocks, so pinned blocks
    remain valid whatever happens to the request.
    """

    entry: VllmRequest
    reported_tokens: int
    hashes: list[bytes] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Pause:
    """A pause that waits for the request's steps in flight. `asked_s`: monotonic clock. `pin` returns the
    number of tokens whose KV is transferred, and the names of the blocks that the target lacks."""

    export: PinnedExport
    asked_s: float
    pin: Callable[[], tuple[int, list[bytes]]]
    done: PauseDone


class VllmExports:
    """All exports of this engine, by request ID."""

    def __init__(
        self, core: LoadedCore, table: VllmRequests, post: Callable[[Callable[[], None]], None]
    ) -> None:
        """`post` runs a command on the engine thread, from any thread."""
        self._core = core
        self._table = table
        self._post = post
        self._exports: dict[str, PinnedExport] = {}
        self._pauses: list[_Pause] = []

    def find(self, request_id: str) -> PinnedExport | None:
        """Return the open export, or None. Any thread."""
        return self._exports.get(request_id)

    def get(self, request_id: str) -> PinnedExport:
        """Return the open export. Any thread. Raises EngineRefusal if there is none."""
        export = self._exports.get(request_id)
        if export is None:
            raise EngineRefusal(f"request {request_id} is not being exported")
        return export

    def open(self, request_id: str) -> Exported:
        """Start an export and pin the request's full blocks; the request continues. Raises EngineRefusal."""
        if request_id in self._exports:
            raise EngineRefusal(f"request {request_id} is already being exported")
        entry = self._table.get(request_id)
        if entry is None:
            raise Gone(f"request {request_id} is not running here")
        status, handover = entry.request.status, self._core.handover
        if handover.mode is TransferMode.STAYS:
            raise EngineRefusal(handover.reason)
        if not self._can_leave(entry):
            raise EngineRefusal(f"request {request_id} is {_state(status)}")
        outputs = list(entry.request.output_token_ids)
        export = PinnedExport(
            reading=InUse(f"the export of {request_id}"), entry=entry, reported_tokens=len(outputs)
        )
        self._exports[request_id] = export
        self._core.scheduler.exporting.add(request_id)
        if handover.mode is TransferMode.LIVE:
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
            replay_reason=handover.reason,
            adapter_version=entry.adapter_version,
        )

    def more(self, request_id: str, have_blocks: int) -> list[bytes]:
        """Pin blocks that have become full, and return the names of all from number `have_blocks` on. Raises
        EngineRefusal."""
        export = self._live(request_id)
        self._pin_full(export)
        return export.hashes[have_blocks:]

    def pause(self, request_id: str, have_blocks: int, asked_s: float, done: PauseDone) -> None:
        """Schedule the request no more. When its steps in flight have ended, pin all its blocks, including
        the partial one, and call `done` with the rest. Raises EngineRefusal.

        `asked_s`: when the pause was requested, by the monotonic clock.
        """
        export = self._running(request_id)
        request = export.entry.request
        if request.status == RequestStatus.RUNNING and not decodes(request):
            raise EngineRefusal(f"request {request_id} is computing its prompt")
        self._pause(_Pause(export, asked_s, lambda: self._pin_all(export, have_blocks), done))

    def stop(self, request_id: str, asked_s: float, done: PauseDone) -> None:
        """Like `pause`, for a request that will be recomputed elsewhere: nothing is pinned."""
        export = self._running(request_id)
        self._pause(_Pause(export, asked_s, lambda: (0, []), done))

    def on_step_end(self) -> None:
        """Complete the pauses of requests without steps in flight."""
        if not self._pauses:
            return
        pauses, self._pauses = self._pauses, []
        for pause in pauses:
            try:
                self._live(pause.export.entry.request_id)
                if pause.export.entry.request.num_in_flight_tokens:
                    self._pauses.append(pause)
                    continue
                result: ExportedPause | EngineRefusal = self._paused(pause)
            except EngineRefusal as refusal:
                result = refusal.with_traceback(None)
            pause.done(result)

    def _pause(self, pause: _Pause) -> None:
        self._core.scheduler.pause(pause.export.entry.request)
        self._pauses.append(pause)
        self.on_step_end()

    def _pin_all(self, export: PinnedExport, have_blocks: int) -> tuple[int, list[bytes]]:
        request, scheduler = export.entry.request, self._core.scheduler
        request_id = request.request_id
        swapped = self._core.host.get(request_id)
        computed = request.num_computed_tokens if swapped is None else swapped.tokens
        if request_id not in scheduler.paused or computed != request.num_tokens - 1:
            # Its last step swapped in corrupt KV, so it was preempted.
            scheduler.unpause(request_id)
            raise EngineRefusal(f"request {request_id} is computing its prompt")
        self._pin_full(export)
        self._pin_rest(export, computed)
        return computed, export.hashes[have_blocks:]

    def _can_leave(self, entry: VllmRequest) -> bool:
        """Return whether the request runs, is swapped out or, if its KV is not transferred, is preempted."""
        status = entry.request.status
        if status == RequestStatus.RUNNING or self._core.host.get(entry.request_id) is not None:
            return True
        return self._core.handover.mode is TransferMode.REPLAY and status == RequestStatus.PREEMPTED

    def _running(self, request_id: str) -> PinnedExport:
        """Return the export of a request that is not paused yet. Raises EngineRefusal."""
        export = self._live(request_id)
        if request_id in self._core.scheduler.paused:
            raise EngineRefusal(f"request {request_id} is already paused")
        if not self._can_leave(export.entry):
            raise EngineRefusal(f"request {request_id} is {_state(export.entry.request.status)}")
        return export

    def _paused(self, pause: _Pause) -> ExportedPause:
        entry = pause.export.entry
        computed, hashes = pause.pin()
        return ExportedPause(
            new_output_token_ids=list(entry.request.output_token_ids)[pause.export.reported_tokens :],
            computed_tokens=computed,
            block_hashes=hashes,
            sampling_state=self._core.generator_state(entry.request_id),
            token_interval_ms=entry.pace.interval_ms,
            predicted_remaining_tokens=entry.predicted_remaining(self._core.max_model_len),
            waited_s=time.monotonic() - pause.asked_s,
        )

    def resume(self, request_id: str) -> None:
        """Abort the export: the request continues. Ignored if there is no export."""
        export = self._close(request_id)
        if export is None:
            return
        if self._table.get(request_id) is export.entry:
            self._core.scheduler.unpause(request_id)
        self._unpin(export)

    def release(self, request_id: str) -> None:
        """Free the request, which another engine runs now; ignored if there is no export."""
        export = self._close(request_id)
        if export is None:
            return
        if self._table.get(request_id) is export.entry:
            self._table.remove(export.entry)
            self._core.finish([request_id])
        self._unpin(export)

    def _close(self, request_id: str) -> PinnedExport | None:
        self._core.scheduler.exporting.discard(request_id)
        export = self._exports.pop(request_id, None)
        # Its pending pauses fail, because the export is gone.
        self.on_step_end()
        return export

    def _live(self, request_id: str) -> PinnedExport:
        export = self.get(request_id)
        if self._table.get(request_id) is not export.entry:
            raise Gone(f"request {request_id} has finished")
        return export

    def _pin_full(self, export: PinnedExport) -> None:
        """Pin the full blocks that the request has now: none while its KV is being recomputed."""
        request = export.entry.request
        swapped = self._core.host.get(request.request_id)
        computed = self._core.scheduler.verified_tokens(request) if swapped is None else swapped.tokens
        have, full = len(export.pinned), self._core.layout.full_blocks(computed)
        self._pin(export, self._core.layout.positions(computed)[have:full])
        export.hashes += [self._core.block_name(request, number) for number in range(have, full)]

    def _pin_rest(self, export: PinnedExport, computed: int) -> None:
        """Pin the blocks that every step changes: partial blocks, sliding windows and recurrent state."""
        rest = self._core.layout.positions(computed)[len(export.pinned) :]
        self._pin(export, rest)
        export.hashes += [b""] * len(rest)

    def _pin(self, export: PinnedExport, positions: Sequence[BlockPosition]) -> None:
        request_id = export.entry.request_id
        swapped = self._core.host.get(request_id)
        if swapped is None:
            blocks = self._core.blocks_at(request_id, positions)
            self._core.block_pool.touch(blocks)
            export.pinned += blocks
            return
        # Only layouts with a single group are swapped.
        for position in positions:
            self._core.host.pin(swapped.slots[position.index])
            export.pinned.append(HostSlot(swapped.slots[position.index]))

    def _unpin(self, export: PinnedExport) -> None:
        def free() -> None:
            self._core.unpin(export.pinned)

        export.reading.close(lambda: self._post(free))


def _state(status: RequestStatus) -> str:
    return "preempted" if status == RequestStatus.PREEMPTED else "waiting"
