"""Spans of each request, from arrival to end. Built only when tracing is on.

    request                 the whole life, under the client's traceparent if it sent one
      placement             until an instance was found
      prefill, reasoning, answering
      recovery              from the loss of an instance until another one had the request

Migrations are spans of the services that make them, under the traceparent that goes with the request.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from opentelemetry.trace import Span, SpanKind, Tracer

from frontend_svc.placement import Placed
from frontend_svc.streams import Stream
from tailrace.cluster import Phase
from tailrace.telemetry import attributes
from tailrace.telemetry.tracing import Attributes, fail, record_span, start_span, traceparent_of, wall_ns


@dataclass(slots=True)
class _Trace:
    root: Span
    traceparent: str
    # prefill, reasoning, answering or recovery; None while the first placement is under way.
    current: Span | None = None
    phase: Phase | None = None
    began_at: int = 0


class RequestTraces:
    """The open spans of all live streams. Told by StreamObserver, never per token."""

    def __init__(self, tracer: Tracer, frontend_id: str) -> None:
        self._tracer = tracer
        self._frontend_id = frontend_id
        self._open: dict[int, _Trace] = {}

    def begin(self, stream: Stream, traceparent: str) -> str:
        """Open the root span; the traceparent that everybody downstream continues."""
        root = start_span(
            self._tracer,
            "request",
            traceparent,
            start_ns=wall_ns(stream.arrived_s),
            attributes={
                attributes.REQUEST_ID: stream.request_id,
                attributes.FRONTEND: self._frontend_id,
                attributes.PROMPT_TOKENS: stream.prompt_tokens,
            },
            kind=SpanKind.SERVER,
        )
        own = traceparent_of(root)
        if not own:
            # Not sampled: no spans here, but the client's own context still goes on.
            return traceparent
        self._open[stream.handle] = _Trace(root, own)
        return own

    def placed(self, stream: Stream, placed: Placed, seconds: float) -> None:
        """An instance has it now."""
        trace = self._open.get(stream.handle)
        if trace is None:
            return
        now_s = time.monotonic()
        about: Attributes = {attributes.INSTANCE: placed.instance_id, attributes.POLICY: placed.by}
        parent = trace.traceparent
        if trace.current is not None:
            parent = traceparent_of(trace.current)
        record_span(
            self._tracer, "placement", parent, wall_ns(now_s - seconds), wall_ns(now_s), attributes=about
        )
        self._enter(trace, stream)

    def phase_changed(self, stream: Stream) -> None:
        """The worker flagged the end of prefill or of reasoning."""
        trace = self._open.get(stream.handle)
        if trace is not None and trace.phase is not stream.phase:
            self._enter(trace, stream)

    def adopted(self, stream: Stream, source: str, target: str) -> None:
        """A migration was committed."""
        trace = self._open.get(stream.handle)
        if trace is not None:
            trace.root.add_event(
                "handover",
                {
                    attributes.MIGRATION_SOURCE: source,
                    attributes.MIGRATION_TARGET: target,
                    attributes.EPOCH: stream.epoch,
                    attributes.OUTPUT_TOKENS: stream.accepted,
                },
            )

    def recovering(self, stream: Stream, instance_id: str, reason: str) -> None:
        """Its instance was lost or gave it up; `placed` or `end` follows."""
        trace = self._open.get(stream.handle)
        if trace is None:
            return
        self._leave(trace, stream)
        about: Attributes = {
            attributes.INSTANCE: instance_id,
            attributes.REASON: reason,
            attributes.EPOCH: stream.epoch,
            attributes.OUTPUT_TOKENS: stream.accepted,
        }
        trace.current = start_span(self._tracer, "recovery", trace.traceparent, attributes=about)

    def end(self, stream: Stream, outcome: str) -> None:
        """The stream is over."""
        trace = self._open.pop(stream.handle, None)
        if trace is None:
            return
        self._leave(trace, stream)
        trace.root.set_attribute(attributes.OUTPUT_TOKENS, stream.accepted)
        trace.root.set_attribute(attributes.EPOCH, stream.epoch)
        trace.root.set_attribute(attributes.OUTCOME, outcome)
        if outcome == "error":
            fail(trace.root, "the request failed")
        trace.root.end()

    def _enter(self, trace: _Trace, stream: Stream) -> None:
        self._leave(trace, stream)
        about: dict[str, str | int] = {attributes.PHASE: stream.phase.value, attributes.EPOCH: stream.epoch}
        if stream.owner is not None:
            about[attributes.INSTANCE] = stream.owner
        trace.current = start_span(self._tracer, stream.phase.value, trace.traceparent, attributes=about)
        trace.phase = stream.phase
        trace.began_at = stream.accepted

    def _leave(self, trace: _Trace, stream: Stream) -> None:
        if trace.current is not None:
            if trace.phase is not None:
                trace.current.set_attribute(attributes.TOKENS, stream.accepted - trace.began_at)
            trace.current.end()
        trace.current = None
        trace.phase = None
