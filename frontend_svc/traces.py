"""Spans of each request. Built only when tracing is on."""

from __future__ import annotations

from frontend_svc.placement import Placed
from frontend_svc.streams import Stream


class RequestTraces:
    """Placeholder until the tracing module lands."""

    def begin(self, stream: Stream, traceparent: str) -> str:
        return traceparent

    def placed(self, stream: Stream, placed: Placed, seconds: float) -> None: ...
    def phase_changed(self, stream: Stream) -> None: ...
    def adopted(self, stream: Stream, source: str, target: str) -> None: ...
    def recovering(self, stream: Stream, instance_id: str, reason: str) -> None: ...
    def end(self, stream: Stream, outcome: str) -> None: ...
