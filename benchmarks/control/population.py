"""Requests of one synthetic instance: they generate tokens at a constant rate, change phase, and finish."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass
from typing import Final

from tailrace.v1 import monitor_pb2, types_pb2

TOKENS_PER_S: Final = 20.0
BLOCK_TOKENS: Final = 16
PROMPT_TOKENS: Final = 1_000
MAX_TOKENS: Final = 16_384
# Seconds that a placed request needs to its first token.
_PREFILL_S: Final = 0.3


@dataclass(slots=True)
class _Request:
    """A request in decode. `began_s`: time of its first token; lengths in tokens."""

    request_id: str
    began_s: float
    reasoning_tokens: int
    output_tokens: int

    def tokens(self, now_s: float) -> int:
        """Return the tokens generated so far; at least one."""
        return min(self.output_tokens, 1 + int((now_s - self.began_s) * TOKENS_PER_S))

    def time_of(self, tokens: int) -> float:
        """Return when the token with this number is generated."""
        return self.began_s + (tokens - 1) / TOKENS_PER_S


class Population:
    """The requests of one instance. Times in seconds of a monotonic clock.

    The steady report is one message whose counts are updated in place, since building a message per request
    and report would cost more than what is measured.
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
        # In the order of the steady report's requests.
        self._requests: list[_Request] = []
        self._due: list[tuple[float, str]] = []
        self._steady = monitor_pb2.WorkerReport(instance_id=instance_id, incarnation=incarnation)
        for number in range(requests):
            request = self._draw(f"{instance_id}-{number}", now_s)
            request.began_s -= self._random.random() * request.output_tokens / TOKENS_PER_S
            self._add(request, now_s)

    @property
    def next_due_s(self) -> float:
        """Return when the next request changes its phase."""
        return self._due[0][0] if self._due else float("inf")

    def place(self, request_id: str, now_s: float) -> None:
        """Add a request whose first token follows after its prefill."""
        heapq.heappush(self._due, (now_s + _PREFILL_S, request_id))

    def take_events(self, now_s: float) -> list[monitor_pb2.PhaseEvent]:
        """Apply and return the phase changes that are due."""
        events: list[monitor_pb2.PhaseEvent] = []
        while self._due and self._due[0][0] <= now_s:
            _, request_id = heapq.heappop(self._due)
            events.append(self._advance(request_id, now_s))
        return events

    def steady(self, events: list[monitor_pb2.PhaseEvent], now_s: float, wall_s: float) -> bytes:
        """Return the next steady report, encoded."""
        report = self._steady
        context = 0
        for request, message in zip(self._requests, report.requests, strict=True):
            tokens = request.tokens(now_s)
            grown = tokens - message.output_tokens
            message.output_tokens = tokens
            message.phase_tokens += grown
            message.kv_blocks = -(-(PROMPT_TOKENS + tokens) // BLOCK_TOKENS)
            context += PROMPT_TOKENS + tokens
        load = report.load
        load.running = len(self._requests)
        load.kv_blocks_used = -(-context // BLOCK_TOKENS)
        load.kv_blocks_total = 4 * load.kv_blocks_used + 1
        load.block_tokens = BLOCK_TOKENS
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

    def _draw(self, request_id: str, now_s: float) -> _Request:
        output_tokens = 2 + int(2 * self._mean_tokens * self._random.random())
        return _Request(request_id, now_s, output_tokens // 2, output_tokens)

    def _add(self, request: _Request, now_s: float) -> None:
        self._requests.append(request)
        reasons = request.tokens(now_s) < request.reasoning_tokens
        self._steady.requests.add(
            request_id=request.request_id,
            frontend_id="frontend",
            phase=types_pb2.PHASE_REASONING if reasons else types_pb2.PHASE_ANSWERING,
            state=types_pb2.REQUEST_STATE_RUNNING,
            prompt_tokens=PROMPT_TOKENS,
            output_tokens=request.tokens(now_s),
            max_tokens=MAX_TOKENS,
            arrival_s=request.began_s,
            token_interval_ms=1e3 / TOKENS_PER_S,
            predicted_remaining_tokens=request.output_tokens - request.tokens(now_s),
        )
        self._schedule(request, reasons)

    def _schedule(self, request: _Request, reasons: bool) -> None:
        last = request.reasoning_tokens if reasons else request.output_tokens
        heapq.heappush(self._due, (request.time_of(last), request.request_id))

    def _advance(self, request_id: str, now_s: float) -> monitor_pb2.PhaseEvent:
        row = next((n for n, r in enumerate(self._requests) if r.request_id == request_id), None)
        if row is None:
            request = self._draw(request_id, now_s)
            self._add(request, now_s)
            return self._event(request, self._steady.requests[-1].phase, now_s)
        request, message = self._requests[row], self._steady.requests[row]
        if message.phase == types_pb2.PHASE_REASONING:
            message.phase, message.phase_tokens = types_pb2.PHASE_ANSWERING, 0
            self._schedule(request, reasons=False)
            return self._event(request, message.phase, now_s)
        del self._requests[row], self._steady.requests[row]
        return self._event(request, types_pb2.PHASE_UNSPECIFIED, now_s)

    def _event(
        self, request: _Request, phase: types_pb2.Phase.ValueType, now_s: float
    ) -> monitor_pb2.PhaseEvent:
        return monitor_pb2.PhaseEvent(
            request_id=request.request_id,
            frontend_id="frontend",
            phase=phase,
            prompt_tokens=PROMPT_TOKENS,
            output_tokens=request.tokens(now_s),
            max_tokens=MAX_TOKENS,
            time_s=now_s,
            predicted_remaining_tokens=request.output_tokens - request.tokens(now_s),
        )
