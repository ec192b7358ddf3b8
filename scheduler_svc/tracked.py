"""One instance as the scheduler knows it: its last report, corrected by what happened since."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Final

from scheduler_svc.wire import PHASES, request_view
from tailrace.cluster import InstanceState, InstanceView, Phase, Pool, RequestState, RequestView
from tailrace.records import InstanceRecord
from tailrace.v1 import monitor_pb2

# A placed request that a report does not show by then never came, or has already gone.
_PENDING_S: Final = 2.0
# Placements remembered while no report comes.
_PENDING_MAX: Final = 1_024

_RUNNING: Final = frozenset({RequestState.RUNNING, RequestState.PAUSED})


@dataclasses.dataclass(frozen=True, slots=True)
class Pending:
    """A request placed here that no report has shown yet. Its whole context is still to be prefilled."""

    request: RequestView
    placed_s: float


class Tracked:
    """Counts are those of the last steady report, moved on by phase events and placements."""

    def __init__(self, record: InstanceRecord, now_s: float) -> None:
        self.record = record
        # None until the first steady report of this incarnation.
        self.load: monitor_pb2.InstanceLoad | None = None
        self.heard_s = now_s
        self.requests: dict[str, RequestView] = {}
        self.pending: dict[str, Pending] = {}
        self._running = 0
        self._waiting = 0
        self._context_tokens = 0
        self._kv_used_tokens = 0
        self._pending_tokens = 0

    @property
    def block_tokens(self) -> int:
        """Tokens of one KV block."""
        return max(1, self.record.block_tokens)

    # ---- what happens

    def report(self, report: monitor_pb2.WorkerReport, migrating: Collection[str], now_s: float) -> set[str]:
        """A steady report; the ids of requests that were here and are no longer."""
        load = self.load = report.load
        self.heard_s = now_s
        before = self.requests.keys() | self.pending.keys()
        block_tokens = load.block_tokens or self.block_tokens
        self.requests = {
            r.request_id: request_view(self.record.instance_id, block_tokens, r, r.request_id in migrating)
            for r in report.requests
        }
        for request_id, pending in list(self.pending.items()):
            if request_id in self.requests or now_s - pending.placed_s > _PENDING_S:
                self._take_pending(request_id)
        self._running = load.running + load.paused
        self._waiting = load.waiting
        self._context_tokens = load.context_tokens
        self._kv_used_tokens = load.kv_blocks_used * block_tokens
        return before - self.requests.keys() - self.pending.keys()

    def place(self, request: RequestView, now_s: float) -> None:
        """The request was placed here and will arrive in a moment."""
        self._take_pending(request.request_id)
        if len(self.pending) >= _PENDING_MAX:
            self._take_pending(next(iter(self.pending)))
        self.pending[request.request_id] = Pending(request, now_s)
        self._pending_tokens += request.context_tokens

    def unplace(self, request_id: str) -> None:
        """The request was placed elsewhere after all."""
        self._take_pending(request_id)

    def event(self, event: monitor_pb2.PhaseEvent) -> RequestView | None:
        """The request entered a phase; None: the event names none that is known."""
        phase = PHASES.get(event.phase)
        if phase is None:
            return None
        known = self.requests.get(event.request_id)
        if known is None:
            return self._arrived(event, phase)
        grown = max(0, event.output_tokens - known.output_tokens)
        self._context_tokens += grown
        moved = dataclasses.replace(
            known, phase=phase, epoch=event.epoch, output_tokens=known.output_tokens + grown
        )
        self.requests[event.request_id] = moved
        return moved

    def gone(self, request_id: str) -> None:
        """The request finished here or left."""
        self._take_pending(request_id)
        request = self.requests.pop(request_id, None)
        if request is None:
            return
        if request.state in _RUNNING:
            self._running = max(0, self._running - 1)
        else:
            self._waiting = max(0, self._waiting - 1)
        self._context_tokens = max(0, self._context_tokens - request.context_tokens)
        self._kv_used_tokens = max(0, self._kv_used_tokens - request.kv_tokens)

    def mark(self, request_id: str, migrating: bool) -> None:
        """A migration of the request was opened or is over."""
        request = self.requests.get(request_id)
        if request is not None:
            self.requests[request_id] = dataclasses.replace(request, migrating=migrating)

    def _arrived(self, event: monitor_pb2.PhaseEvent, phase: Phase) -> RequestView:
        """Not in a report yet: placed here a moment ago, or handed over to here."""
        pending = self._take_pending(event.request_id)
        context = event.prompt_tokens + event.output_tokens
        blocks = -(-context // self.block_tokens)
        request = RequestView(
            request_id=event.request_id,
            instance_id=self.record.instance_id,
            phase=phase,
            state=RequestState.RUNNING,
            prompt_tokens=event.prompt_tokens,
            output_tokens=event.output_tokens,
            max_tokens=pending.request.max_tokens if pending is not None else 0,
            epoch=event.epoch,
            kv_tokens=blocks * self.block_tokens,
            arrival_s=event.time_s,
            frontend_id=event.frontend_id,
        )
        self.requests[event.request_id] = request
        self._running += 1
        self._context_tokens += context
        self._kv_used_tokens += request.kv_tokens
        return request

    def _take_pending(self, request_id: str) -> Pending | None:
        pending = self.pending.pop(request_id, None)
        if pending is not None:
            self._pending_tokens -= pending.request.context_tokens
        return pending

    # ---- what a policy sees

    def view(self, state: InstanceState, pool: Pool | None) -> InstanceView:
        """The instance now."""
        load = self.load
        blocks = self.record.kv_blocks_total
        backlog = 0
        if load is not None:
            blocks = load.kv_blocks_total or blocks
            backlog = load.prefill_backlog_tokens
        return InstanceView(
            instance_id=self.record.instance_id,
            state=state,
            pool=pool,
            kv_capacity_tokens=blocks * self.block_tokens,
            kv_used_tokens=self._kv_used_tokens,
            block_tokens=self.block_tokens,
            max_model_len=self.record.max_model_len,
            running=self._running,
            waiting=self._waiting + len(self.pending),
            prefill_backlog_tokens=backlog + self._pending_tokens,
            context_tokens=self._context_tokens + self._pending_tokens,
            token_interval_s=load.token_interval_ms_mean / 1e3 if load is not None else 0.0,
            migrations_in=load.migrations_in if load is not None else 0,
            migrations_out=load.migrations_out if load is not None else 0,
            requests=(*self.requests.values(), *(p.request for p in self.pending.values())),
        )
