"""Collect phase changes for the monitor."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass
from typing import Final

from tailrace.messages import PHASE_NUMBERS, REQUEST_STATE_NUMBERS
from tailrace.v1 import monitor_pb2, types_pb2
from worker_agent.engine.base import RequestStats
from worker_agent.running_requests import RunningRequest, RunningRequests

# Events beyond this are dropped, oldest first: the next steady report contains all that matters.
_PENDING_MAX: Final = 10_000

STATES: Final = {state.value: number for state, number in REQUEST_STATE_NUMBERS.items()}


@dataclass(frozen=True, slots=True)
class _Gone:
    """A request that has left. Encoded with the report: whatever is wrong with it then ends no step."""

    request_id: str
    frontend_id: str
    epoch: int
    output_tokens: int
    time_s: float
    answered: monitor_pb2.Answered | None
    moved_to: str


class PhaseEvents:
    """Collect events between two reports.

    The data path only records which requests changed; which phase they entered is read from the engine when
    the events are sent.
    """

    def __init__(self) -> None:
        self._changed: dict[str, None] = {}
        self._gone: deque[_Gone] = deque(maxlen=_PENDING_MAX)
        self.wakeup = asyncio.Event()

    @property
    def pending(self) -> bool:
        """Return whether there are events to send."""
        return bool(self._changed or self._gone)

    @property
    def needs_stats(self) -> bool:
        """Return whether `take` needs the engine's requests."""
        return bool(self._changed)

    def changed(self, request_id: str) -> None:
        """Record that a request entered a phase, or came to this instance."""
        if len(self._changed) < _PENDING_MAX:
            self._changed[request_id] = None
        self.wakeup.set()

    def gone(
        self,
        request: RunningRequest,
        output_tokens: int = 0,
        answered: monitor_pb2.Answered | None = None,
        moved_to: str = "",
    ) -> None:
        """Record that a request has left this instance: finished, aborted or moved. `output_tokens`: if
        known; `answered`, `moved_to`: as in PhaseEvent."""
        self._changed.pop(request.request_id, None)
        left = (request.request_id, request.frontend_id, request.epoch, output_tokens, time.time())
        self._gone.append(_Gone(*left, answered, moved_to))
        self.wakeup.set()

    def take(self, requests: list[RequestStats], running: RunningRequests) -> list[monitor_pb2.PhaseEvent]:
        """Return and remove all events, given the engine's current requests."""
        self.wakeup.clear()
        gone, self._gone = self._gone, deque(maxlen=_PENDING_MAX)
        events = [
            monitor_pb2.PhaseEvent(
                request_id=left.request_id,
                frontend_id=left.frontend_id,
                epoch=left.epoch,
                phase=types_pb2.PHASE_UNSPECIFIED,
                output_tokens=left.output_tokens,
                time_s=left.time_s,
                answered=left.answered,
                moved_to_instance_id=left.moved_to,
            )
            for left in gone
        ]
        if self._changed:
            changed, self._changed = self._changed, {}
            now_s = time.time()
            events += [
                monitor_pb2.PhaseEvent(
                    request_id=request.request_id,
                    frontend_id=request.frontend_id,
                    epoch=request.epoch,
                    phase=PHASE_NUMBERS[request.phase],
                    prompt_tokens=request.prompt_tokens,
                    output_tokens=request.output_tokens,
                    time_s=now_s,
                    max_tokens=request.max_tokens,
                    phase_tokens=request.phase_tokens,
                    state=STATES[request.state],
                    traceparent=_traceparent(running.by_id(request.request_id)),
                    predicted_remaining_tokens=request.predicted_remaining_tokens,
                )
                for request in requests
                if request.request_id in changed
            ]
        return events


def _traceparent(running: RunningRequest | None) -> str:
    return "" if running is None else running.traceparent
