"""Requests of one synthetic instance: they generate tokens at a constant rate, change phase, and finish."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from tailrace.perf.horizon import HORIZON
from tailrace.v1 import monitor_pb2, types_pb2

TOKENS_PER_S: Final = 20.0
BLOCK_TOKENS: Final = 16
PROMPT_TOKENS: Final = 1_000
MAX_TOKENS: Final = 16_384
# Seconds that a placed request needs to its first token.
_PREFILL_S: Final = 0.3
_FRONTEND: Final = "frontend"


@dataclass(frozen=True, slots=True)
class Moved:
    """A request on its way to another instance. Times in seconds, lengths in tokens."""

    request_id: str
    phase: types_pb2.Phase.ValueType
    tokens: int
    values: tuple[float, ...]


class _Rows:
    """Properties of the requests, one column of an array for each, in the order of the steady report."""

    def __init__(self) -> None:
        self.count = 0
        # Time of the first token; tokens of the output, of its reasoning, and before the present phase.
        self._values = np.zeros((4, 1))

    @property
    def output_tokens(self) -> npt.NDArray[np.int64]:
        """Return the lengths of the outputs."""
        return self._values[1, : self.count].astype(np.int64)

    @property
    def phase_from(self) -> npt.NDArray[np.int64]:
        """Return the tokens before each request's present phase."""
        return self._values[3, : self.count].astype(np.int64)

    def tokens(self, now_s: float) -> npt.NDArray[np.int64]:
        """Return the tokens generated so far; at least one."""
        began_s, output_tokens = self._values[:2, : self.count]
        made = 1.0 + np.floor((now_s - began_s) * TOKENS_PER_S)
        tokens: npt.NDArray[np.float64] = np.minimum(output_tokens, made)
        return tokens.astype(np.int64)

    def add(self, began_s: float, output_tokens: int) -> None:
        """Add a request at the end; the first half of its output is reasoning."""
        self.restore((began_s, output_tokens, output_tokens // 2, 0.0))

    def values_of(self, row: int) -> tuple[float, ...]:
        """Return the properties of one request, for `restore`."""
        return tuple(self._values[:, row].tolist())

    def restore(self, values: tuple[float, ...]) -> None:
        """Add a request with these properties at the end."""
        if self.count == self._values.shape[1]:
            self._values = np.concatenate([self._values, np.zeros_like(self._values)], axis=1)
        self._values[:, self.count] = values
        self.count += 1

    def remove(self, row: int) -> None:
        """Remove a request."""
        self._values[:, row : self.count - 1] = self._values[:, row + 1 : self.count]
        self.count -= 1

    def tokens_of(self, row: int, now_s: float) -> int:
        """Return the tokens that one request has generated so far."""
        began_s, output_tokens, _, _ = self._values[:, row].tolist()
        return min(int(output_tokens), 1 + int((now_s - began_s) * TOKENS_PER_S))

    def length_of(self, row: int) -> int:
        """Return the length of one request's output."""
        return int(self._values[1, row])

    def reasons(self, row: int, now_s: float) -> bool:
        """Return whether a request has not made the last token of its reasoning."""
        return self.tokens_of(row, now_s) < int(self._values[2, row])

    def answer(self, row: int, now_s: float) -> None:
        """Begin a request's answer."""
        self._values[3, row] = self.tokens_of(row, now_s)

    def phase_ends_s(self, row: int, reasons: bool) -> float:
        """Return when the last token of a request's reasoning, or of its answer, is generated."""
        began_s, output_tokens, reasoning_tokens, _ = self._values[:, row].tolist()
        last: float = reasoning_tokens if reasons else output_tokens
        return float(began_s + (last - 1) / TOKENS_PER_S)


class Population:
    """The requests of one instance. Times in seconds of a monotonic clock.

    The steady report is one message whose columns are kept, or replaced from arrays, since building it anew
    for each report would cost more than what is measured.
    """

    def __init__(
        self, instance_id: str, incarnation: str, requests: int, mean_tokens: int, seed: str, now_s: float
    ) -> None:
        """Begin with `requests` requests of random ages; output lengths are uniform with this mean."""
        self.instance_id = instance_id
        self.incarnation = incarnation
        self.seq = 0
        self._random = random.Random(seed)
        self._mean_tokens = mean_tokens
        self._ids: list[str] = []
        self._rows = _Rows()
        # Ends of phases, and of the prefill of placed requests; entries of requests that have moved stay.
        self._due: list[tuple[float, str]] = []
        self._placed: set[str] = set()
        self._news: list[monitor_pb2.PhaseEvent] = []
        self._steady = monitor_pb2.WorkerReport(instance_id=instance_id, incarnation=incarnation)
        self._steady.requests.frontend_ids.append(_FRONTEND)
        # At the start a quarter is in use; an instance that is sent ever more requests becomes full.
        load = self._steady.load
        load.block_tokens = BLOCK_TOKENS
        load.kv_blocks_total = 4 * requests * -(-(PROMPT_TOKENS + mean_tokens // 2) // BLOCK_TOKENS)
        for number in range(requests):
            output_tokens = self._draw_length()
            age_s = self._random.random() * output_tokens / TOKENS_PER_S
            self._add(f"{instance_id}-{number}", now_s - age_s, output_tokens, now_s)

    @property
    def next_due_s(self) -> float:
        """Return when the next request changes its phase."""
        return self._due[0][0] if self._due else float("inf")

    def place(self, request_id: str, now_s: float) -> None:
        """Add a request whose first token follows after its prefill."""
        self._placed.add(request_id)
        heapq.heappush(self._due, (now_s + _PREFILL_S, request_id))

    def take_events(self, now_s: float) -> list[monitor_pb2.PhaseEvent]:
        """Apply and return the phase changes that are due."""
        events, self._news = self._news, []
        while self._due and self._due[0][0] <= now_s:
            _, request_id = heapq.heappop(self._due)
            if (event := self._advance(request_id, now_s)) is not None:
                events.append(event)
        return events

    def leave(self, request_id: str, now_s: float) -> Moved | None:
        """Remove a request that moves to another instance; return None if it is not here any more."""
        if request_id not in self._ids:
            return None
        row = self._ids.index(request_id)
        event = self._event(row, types_pb2.PHASE_UNSPECIFIED, now_s)
        event.output_tokens = 0
        self._news.append(event)
        phase = self._steady.requests.phases[row]
        moved = Moved(request_id, phase, self._rows.tokens_of(row, now_s), self._rows.values_of(row))
        self._remove(row)
        return moved

    def join(self, moved: Moved, epoch: int, now_s: float) -> None:
        """Add a request that has moved here."""
        self._ids.append(moved.request_id)
        self._rows.restore(moved.values)
        self._append(moved.request_id, moved.phase, epoch, now_s)
        self._news.append(self._event(len(self._ids) - 1, moved.phase, now_s))

    def steady(self, events: list[monitor_pb2.PhaseEvent], now_s: float, wall_s: float) -> bytes:
        """Return the next steady report, encoded."""
        report, rows = self._steady, self._rows
        tokens = rows.tokens(now_s)
        blocks = -(-(PROMPT_TOKENS + tokens) // BLOCK_TOKENS)
        columns, load = report.requests, report.load
        columns.output_tokens[:] = tokens.tolist()
        columns.phase_tokens[:] = (tokens - rows.phase_from).tolist()
        columns.kv_blocks[:] = blocks.tolist()
        remaining = rows.output_tokens - tokens
        columns.predicted_remaining_tokens[:] = remaining.tolist()
        # As `FutureLoad`, with less work: the synthetic workers share the cores with what is measured.
        growth = HORIZON.contributions(
            (PROMPT_TOKENS + tokens).astype(np.float64), remaining.astype(np.float64)
        )
        load.future_load[:] = growth.sum(axis=0).tolist()
        context = PROMPT_TOKENS * len(self._ids) + int(tokens.sum())
        load.running = len(self._ids)
        load.kv_blocks_used = int(blocks.sum())
        load.context_tokens = context
        load.token_interval_ms_mean = 1e3 / TOKENS_PER_S
        del report.phase_events[:]
        report.phase_events.extend(events)
        return self._encoded(report, wall_s)

    def changes(self, events: list[monitor_pb2.PhaseEvent], wall_s: float) -> bytes:
        """Return a report of phase changes alone, encoded."""
        report = monitor_pb2.WorkerReport(
            instance_id=self.instance_id, incarnation=self.incarnation, phase_events=events
        )
        return self._encoded(report, wall_s)

    def _encoded(self, report: monitor_pb2.WorkerReport, wall_s: float) -> bytes:
        self.seq += 1
        report.seq, report.time_s = self.seq, wall_s
        return report.SerializeToString()

    def _draw_length(self) -> int:
        return 2 + int(2 * self._mean_tokens * self._random.random())

    def _add(self, request_id: str, began_s: float, output_tokens: int, now_s: float) -> None:
        row = len(self._ids)
        self._ids.append(request_id)
        self._rows.add(began_s, output_tokens)
        reasons = self._rows.reasons(row, now_s)
        phase = types_pb2.PHASE_REASONING if reasons else types_pb2.PHASE_ANSWERING
        self._append(request_id, phase, 0, began_s)

    def _append(
        self, request_id: str, phase: types_pb2.Phase.ValueType, epoch: int, arrival_s: float
    ) -> None:
        """Add the last request to the report's columns, and schedule the end of its phase."""
        columns = self._steady.requests
        columns.request_ids.append(request_id)
        columns.frontends.append(0)
        columns.epochs.append(epoch)
        columns.phases.append(phase)
        columns.states.append(types_pb2.REQUEST_STATE_RUNNING)
        columns.prompt_tokens.append(PROMPT_TOKENS)
        columns.max_tokens.append(MAX_TOKENS)
        columns.arrival_s.append(arrival_s)
        columns.token_interval_ms.append(1e3 / TOKENS_PER_S)
        self._schedule(len(self._ids) - 1, phase == types_pb2.PHASE_REASONING)

    def _remove(self, row: int) -> None:
        del self._ids[row]
        self._rows.remove(row)
        columns = self._steady.requests
        for column in (
            columns.request_ids,
            columns.frontends,
            columns.epochs,
            columns.phases,
            columns.states,
            columns.prompt_tokens,
            columns.max_tokens,
            columns.arrival_s,
            columns.token_interval_ms,
        ):
            del column[row]

    def _schedule(self, row: int, reasons: bool) -> None:
        """Schedule the end of the request's phase: its last token in it."""
        heapq.heappush(self._due, (self._rows.phase_ends_s(row, reasons), self._ids[row]))

    def _advance(self, request_id: str, now_s: float) -> monitor_pb2.PhaseEvent | None:
        """Let a placed request begin, or a request end its phase; return the event.

        None: the request has moved, or this has happened already.
        """
        if request_id in self._placed:
            self._placed.discard(request_id)
            self._add(request_id, now_s, self._draw_length(), now_s)
            return self._event(len(self._ids) - 1, self._steady.requests.phases[-1], now_s)
        if request_id not in self._ids:
            return None
        row = self._ids.index(request_id)
        phases = self._steady.requests.phases
        reasons = phases[row] == types_pb2.PHASE_REASONING
        if self._rows.phase_ends_s(row, reasons) > now_s:
            return None
        if reasons:
            phases[row] = types_pb2.PHASE_ANSWERING
            self._rows.answer(row, now_s)
            self._schedule(row, reasons=False)
            return self._event(row, types_pb2.PHASE_ANSWERING, now_s)
        event = self._event(row, types_pb2.PHASE_UNSPECIFIED, now_s)
        self._remove(row)
        return event

    def _event(self, row: int, phase: types_pb2.Phase.ValueType, now_s: float) -> monitor_pb2.PhaseEvent:
        tokens = self._rows.tokens_of(row, now_s)
        return monitor_pb2.PhaseEvent(
            request_id=self._ids[row],
            frontend_id=_FRONTEND,
            epoch=self._steady.requests.epochs[row],
            phase=phase,
            prompt_tokens=PROMPT_TOKENS,
            output_tokens=tokens,
            max_tokens=MAX_TOKENS,
            time_s=now_s,
            predicted_remaining_tokens=self._rows.length_of(row) - tokens,
        )
