"""One instance as the scheduler knows it: its last report, corrected by what happened since."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Set
from typing import Final

from tailrace.cache.follow import CacheState
from tailrace.cluster import InstanceState, InstanceView, Phase, Pool, RequestState, RequestView
from tailrace.control.cluster_model import Corrections, CountedRequest, Pending
from tailrace.control.recording import InstanceKnown, RecordedPending
from tailrace.control.reported_requests import ReportedRequests, ReportedRows
from tailrace.messages import PHASES, REQUEST_STATES, predicted_remaining
from tailrace.perf.measured import Measured
from tailrace.perf.ttft import TtftPredictor
from tailrace.policy.candidates import kv_needed_tokens
from tailrace.records import InstanceRecord
from tailrace.v1 import monitor_pb2

# Seconds after which a placed request that no report shows has never arrived, or has already gone.
_PENDING_S: Final = 2.0
UNREPORTED_S: Final = 2 * _PENDING_S
"""Seconds without a report after which what is known is out of date: a placed request is forgotten, which
would count forever on an instance of which nothing is heard."""
# Pending placements that are kept while no report arrives.
_PENDING_MAX: Final = 1_024
# Seconds after which a request placed here, by any scheduler, appears in a report.
_REPORT_LAG_S: Final = 1.0

_NO_LOAD: Final = monitor_pb2.InstanceLoad()
_NO_REQUESTS: Final = monitor_pb2.RequestColumns()

_RUNNING: Final = frozenset({RequestState.RUNNING, RequestState.PAUSED})


@dataclasses.dataclass(slots=True)
class PendingRequest(Pending):
    """A pending placement; `placed` is the scheduler's monotonic time."""

    request: RequestView


class ReportedInstance(Corrections[str, PendingRequest]):
    """Hold the counts of the last steady report, updated by phase events and placements."""

    def __init__(self, record: InstanceRecord, now_s: float) -> None:
        super().__init__()
        self.record = record
        # None until the first steady report of this incarnation.
        self.load: monitor_pb2.InstanceLoad | None = None
        self.last_report_s = now_s
        # Requests of the last steady report, and those that have changed since; None: gone.
        self._rows = self._no_rows()
        self._changed: dict[str, RequestView | None] = {}
        # Id, epoch and phase of the requests of the last steady report whose location may be another one:
        # rows that are not as in the report before, and those left unsettled since.
        self.to_check: list[tuple[str, int, Phase]] = []
        # Requests to check with the next steady report.
        self._unsettled: set[str] = set()
        # Trace contexts of requests that are traced, from events since the last steady report.
        self._traceparents: dict[str, str] = {}

    @property
    def block_tokens(self) -> int:
        """Return the tokens per KV block."""
        return max(1, self.record.block_tokens)

    # ---- what happens

    def apply_steady(self, report: monitor_pb2.WorkerReport, migrating: Set[str], now_s: float) -> set[str]:
        """Apply a steady report; return the ids of requests that were here and are not any more."""
        load = self.load = report.load
        self.last_report_s = now_s
        before, changed = self._rows, self._changed
        block_tokens = load.block_tokens or self.block_tokens
        rows = self._rows = ReportedRows(
            self.record.instance_id, block_tokens, self.record.max_model_len, report.requests, before
        )
        left = rows.left_since(before)
        for request_id, request in changed.items():
            if request is None:
                left.discard(request_id)
            elif request_id not in rows:
                left.add(request_id)
        self._unsettled.update(changed)
        self.to_check = rows.changed_since(before, self._unsettled)
        self._unsettled.clear()
        self._changed = {}
        if migrating:
            for request_id in rows.in_order(migrating):
                self.set_migrating(request_id, True)
        self._traceparents = {}
        for request_id, pending in list(self.pending.items()):
            if request_id in rows:
                self.remove_pending(request_id)
            elif now_s - pending.placed > _PENDING_S:
                self.remove_pending(request_id)
                left.add(request_id)
        # The KV that an import reserves is in kv_blocks_used from its beginning.
        for request_id in list(self.coming)[: load.migrations_in]:
            self.coming[request_id] = 0
        self.reset_changes()
        return left - self.pending.keys() if self.pending else left

    def reported_prompt_tokens(self, request_id: str) -> int:
        """Return the length of the prompt of a request of the last steady report."""
        return self._rows.prompt_tokens(request_id)

    def unsettle(self, request_id: str) -> None:
        """Have the request checked with the next steady report, if it is in it."""
        self._unsettled.add(request_id)

    def place(self, request: RequestView, now_s: float, cached_tokens: int = 0) -> str | None:
        """Add a request that was placed here and will arrive soon, of which `cached_tokens` are cached.

        Return the id of a pending one that had to be dropped for it because no report has arrived for long,
        or None.
        """
        self.remove_pending(request.request_id)
        forgotten = None
        if len(self.pending) >= _PENDING_MAX:
            forgotten = next(iter(self.pending))
            self.remove_pending(forgotten)
        pending = PendingRequest(request.context_tokens, cached_tokens, now_s, request)
        self.add_pending(request.request_id, pending)
        return forgotten

    def forget_unreported(self, request_id: str, placed_s: float) -> bool:
        """Forget a request that was placed then and is still pending; return whether there was one."""
        pending = self.pending.get(request_id)
        if pending is None or pending.placed != placed_s:
            return False
        self.remove_pending(request_id)
        return True

    def enter_phase(self, event: monitor_pb2.PhaseEvent) -> RequestView | None:
        """Apply a phase event; return the request, or None if the phase is unknown."""
        phase = PHASES.get(event.phase)
        if phase is None:
            return None
        if event.traceparent:
            self._traceparents[event.request_id] = event.traceparent
        known = self._held(event.request_id)
        if known is None:
            return self._add_from_event(event, phase)
        grown = max(0, event.output_tokens - known.output_tokens)
        moved = dataclasses.replace(
            known,
            phase=phase,
            state=REQUEST_STATES.get(event.state, RequestState.RUNNING),
            epoch=event.epoch,
            output_tokens=known.output_tokens + grown,
            phase_tokens=event.phase_tokens,
            predicted_remaining_tokens=self._predicted_remaining(event, known, grown),
        )
        self.change_request(_as_counted(known), _as_counted(moved))
        self._changed[event.request_id] = moved
        return moved

    def finish(self, request_id: str) -> None:
        """Remove a request that finished here or left."""
        self.remove_pending(request_id)
        counted = self._counted(request_id)
        if counted is None:
            return
        if request_id in self._rows:
            self._changed[request_id] = None
        else:
            del self._changed[request_id]
        self.remove_request(counted)

    def reserve(self, request_id: str, context_tokens: int) -> None:
        """Reserve KV for a migration to this instance that was opened."""
        self.open_arrival(request_id, kv_needed_tokens(context_tokens, self.block_tokens), context_tokens)

    def set_migrating(self, request_id: str, migrating: bool) -> None:
        """Set whether a migration of the request is open."""
        request = self._held(request_id)
        if request is not None:
            self._changed[request_id] = dataclasses.replace(request, migrating=migrating)

    def _add_from_event(self, event: monitor_pb2.PhaseEvent, phase: Phase) -> RequestView:
        """Add a request that is not in a report yet: placed a moment ago, or handed over to this instance."""
        pending = self.remove_pending(event.request_id)
        context = event.prompt_tokens + event.output_tokens
        blocks = -(-context // self.block_tokens)
        request = RequestView(
            request_id=event.request_id,
            instance_id=self.record.instance_id,
            phase=phase,
            state=REQUEST_STATES.get(event.state, RequestState.RUNNING),
            prompt_tokens=event.prompt_tokens,
            output_tokens=event.output_tokens,
            max_tokens=event.max_tokens or (pending.request.max_tokens if pending is not None else 0),
            epoch=event.epoch,
            kv_tokens=blocks * self.block_tokens,
            arrival_s=event.time_s,
            frontend_id=event.frontend_id,
            phase_tokens=event.phase_tokens,
            predicted_remaining_tokens=predicted_remaining(event, self.record.max_model_len),
        )
        self._changed[event.request_id] = request
        self.add_request(event.request_id, _as_counted(request))
        return request

    def _predicted_remaining(
        self, event: monitor_pb2.PhaseEvent, known: RequestView, grown: int
    ) -> float | None:
        """Return the event's prediction, or else what is left of the previous one."""
        predicted = predicted_remaining(event, self.record.max_model_len)
        if predicted is not None or known.predicted_remaining_tokens is None:
            return predicted
        return max(0.0, known.predicted_remaining_tokens - grown)

    def requests(self) -> ReportedRequests:
        """Return the requests here now, as last reported or placed."""
        pending = tuple(pending.request for pending in self.pending.values())
        return ReportedRequests(self._rows, dict(self._changed), pending)

    def shows_placed_before(self, at_s: float) -> bool:
        """Return whether the last report shows all requests that were placed here before, by any
        scheduler."""
        return self.last_report_s > at_s + _REPORT_LAG_S

    def arrivals(self) -> Iterator[tuple[str, float]]:
        """Yield id and arrival (time of day in seconds; 0: not known) of each request here, without making
        views."""
        for request_id, arrival_s in self._rows.arrivals():
            if request_id not in self._changed:
                yield request_id, arrival_s
        for request_id, request in self._changed.items():
            if request is not None:
                yield request_id, request.arrival_s
        for request_id, pending in self.pending.items():
            yield request_id, pending.request.arrival_s

    def prompt_tokens(self, request_id: str) -> int | None:
        """Return the length of the prompt of a request, as last reported or placed; None if it is not
        here."""
        if request_id not in self._changed and request_id in self._rows:
            return self._rows.prompt_tokens(request_id)
        request = self.find(request_id)
        return None if request is None else request.prompt_tokens

    def find(self, request_id: str) -> RequestView | None:
        """Return a request as last reported, or placed; None if it is not here."""
        held = self._held(request_id)
        if held is None and (pending := self.pending.get(request_id)) is not None:
            held = pending.request
        return held

    def traceparent(self, request_id: str) -> str:
        """Return the trace context that this instance reports for a request; "" if it is not traced."""
        if self._held(request_id) is None:
            return ""
        return self._traceparents.get(request_id) or self._rows.traceparent(request_id)

    def _held(self, request_id: str) -> RequestView | None:
        """Return a request that was reported here and has not left; None if there is none."""
        if request_id in self._changed:
            return self._changed[request_id]
        return self._rows.view(request_id) if request_id in self._rows else None

    def _counted(self, request_id: str) -> CountedRequest | None:
        """Return how a request that was reported here is counted, without making its view; None if there is
        none."""
        if request_id in self._changed:
            request = self._changed[request_id]
            return None if request is None else _as_counted(request)
        return self._rows.counted(request_id) if request_id in self._rows else None

    def _coming_tokens(self) -> int:
        """Return the context of requests whose migration to here is open and which are not here yet."""
        rows, changed = self._rows, self._changed
        return sum(
            tokens
            for name, tokens in self.coming_context.items()
            if (name not in rows if name not in changed else changed[name] is None)
        )

    def _held_ids(self) -> Iterator[str]:
        for request_id in self._rows:
            if request_id not in self._changed:
                yield request_id
        for request_id, request in self._changed.items():
            if request is not None:
                yield request_id

    def _no_rows(self) -> ReportedRows:
        return ReportedRows(
            self.record.instance_id, self.block_tokens, self.record.max_model_len, _NO_REQUESTS
        )

    # ---- recordings

    def state(self, cache: CacheState | None) -> InstanceKnown:
        """Return the state that `restore` takes, without traces.

        From now on both keep the requests in the same order, whatever happens to them.
        """
        self._hold([request for name in self._held_ids() if (request := self._held(name)) is not None])
        return InstanceKnown(
            instance_id=self.record.instance_id,
            load=None if self.load is None else self.load.SerializeToString(),
            heard_s=self.last_report_s,
            requests=[request for request in self._changed.values() if request is not None],
            pending=[RecordedPending(p.request, p.placed, p.cached_tokens) for p in self.pending.values()],
            coming=dict(self.coming),
            coming_context=dict(self.coming_context),
            leaving=sorted(self.leaving),
            running_change=self.running_change,
            waiting_change=self.waiting_change,
            context_change=self.context_change,
            kv_change=self.kv_change,
            cache=cache,
        )

    def restore(self, state: InstanceKnown) -> None:
        """Continue from a recorded state. The instance must be new."""
        self.load = None if state.load is None else monitor_pb2.InstanceLoad.FromString(state.load)
        self.last_report_s = state.heard_s
        self._hold(state.requests)
        for known in state.pending:
            request = known.request
            pending = PendingRequest(request.context_tokens, known.cached_tokens, known.placed_s, request)
            self.add_pending(request.request_id, pending)
        self.coming.update(state.coming)
        self.coming_context.update(state.coming_context)
        self.leaving.update(state.leaving)
        self.running_change, self.waiting_change = state.running_change, state.waiting_change
        self.context_change, self.kv_change = state.context_change, state.kv_change

    def _hold(self, requests: Collection[RequestView]) -> None:
        """Hold these requests, in this order, in place of the report's."""
        self._rows = self._no_rows()
        self._changed = {request.request_id: request for request in requests}

    # ---- what a policy sees

    def view(self, state: InstanceState, pool: Pool | None, measured: Measured | None = None) -> InstanceView:
        """Return the instance now; `measured`: measurements of its kind."""
        load = self.load if self.load is not None else _NO_LOAD
        blocks = load.kv_blocks_total or self.record.kv_blocks_total
        kv_bytes = max(1, self.record.kv_bytes_per_token)
        predictor = _ttft_predictor(load)
        running, waiting, context_tokens, kv_used_tokens = self.counts(
            load.running + load.paused,
            load.waiting,
            load.context_tokens,
            load.kv_blocks_used * (load.block_tokens or self.block_tokens),
        )
        return InstanceView(
            instance_id=self.record.instance_id,
            state=state,
            pool=pool,
            kv_capacity_tokens=blocks * self.block_tokens,
            kv_used_tokens=kv_used_tokens,
            block_tokens=self.block_tokens,
            max_model_len=self.record.max_model_len,
            max_num_seqs=self.record.max_num_seqs,
            running=running,
            waiting=waiting,
            prefill_backlog_tokens=(
                load.prefill_backlog_tokens + self.pending_tokens - self.pending_cached_tokens
            ),
            context_tokens=context_tokens,
            token_interval_s=load.token_interval_ms_mean / 1e3,
            host_kv_tokens=load.host_kv_bytes_used // kv_bytes,
            host_kv_capacity_tokens=load.host_kv_bytes_total // kv_bytes,
            prefill_delay_s=None if predictor is None else self._prefill_delay_s(load, predictor),
            ttft=predictor,
            max_running_tokens=load.max_running_tokens if load.HasField("max_running_tokens") else None,
            future_load=tuple(load.future_load),
            measured=measured,
            migrations_in=max(load.migrations_in, len(self.coming)),
            migrations_out=max(load.migrations_out, len(self.leaving)),
            coming_tokens=self._coming_tokens() if self.coming_context else 0,
            migration_tokens_per_s=load.migration_bytes_per_s / kv_bytes
            if load.HasField("migration_bytes_per_s")
            else None,
            requests=self.requests(),
        )

    def _prefill_delay_s(self, load: monitor_pb2.InstanceLoad, predictor: TtftPredictor) -> float:
        """Return the reported delay plus that of the placements since, in seconds."""
        waiting = self.pending.values()
        placed_s = predictor.queue_s(pending.tokens for pending in waiting)
        cached_s = sum(
            predictor.saved_s(pending.cached_tokens) for pending in waiting if pending.cached_tokens
        )
        return load.prefill_delay_s + placed_s - cached_s


def _ttft_predictor(load: monitor_pb2.InstanceLoad) -> TtftPredictor | None:
    """Return the TTFT predictor of the worker's profile, or None if it has none."""
    if not load.HasField("prefill_delay_s"):
        return None
    return TtftPredictor(load.prefill_base_s, load.prefill_s_per_token, load.prefill_s_per_token_squared)


def _as_counted(request: RequestView) -> CountedRequest:
    return CountedRequest(request.context_tokens, request.kv_tokens, request.state in _RUNNING)
