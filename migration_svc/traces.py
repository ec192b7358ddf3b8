"""Trace spans of migrations, under their requests' traces; targets add the copy rounds as children."""

from __future__ import annotations

from dataclasses import dataclass

from opentelemetry.trace import Span

from tailrace.telemetry import attributes as names
from tailrace.telemetry.tracing import Tracing, fail, start_span, traceparent_of
from tailrace.v1 import migration_pb2, types_pb2


@dataclass(frozen=True, slots=True)
class MigrationTrace:
    """One migration's span; None if its request is not traced."""

    span: Span | None

    @property
    def traceparent(self) -> str:
        """Return the parent for spans of other processes that work on this migration."""
        return "" if self.span is None else traceparent_of(self.span)


class MigrationTraces:
    """Start and end the spans."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._tracer = tracing.tracer("migration")

    def start(self, traceparent: str, record: migration_pb2.MigrationRecord) -> MigrationTrace:
        """Start a span under the request's root span; no span if that is not traced."""
        if not self._tracing.continues(traceparent):
            return MigrationTrace(None)
        span = start_span(
            self._tracer,
            "migration",
            traceparent,
            attributes={
                names.REQUEST_ID: record.request_id,
                names.MIGRATION_ID: record.migration_id,
                names.MIGRATION_SOURCE: record.source_instance_id,
                names.MIGRATION_TARGET: record.target_instance_id,
                names.EPOCH: record.epoch,
                names.REASON: record.reason,
                names.POLICY: record.policy,
            },
        )
        return MigrationTrace(span)

    def end(self, trace: MigrationTrace, record: migration_pb2.MigrationRecord) -> None:
        """End the span with the outcome."""
        span = trace.span
        if span is None:
            return
        state = types_pb2.MigrationState.Name(record.state).removeprefix("MIGRATION_STATE_").lower()
        span.set_attributes(
            {
                names.MIGRATION_STATE: state,
                names.MIGRATION_ROUNDS: len(record.rounds),
                names.MIGRATION_BYTES: record.bytes,
                names.MIGRATION_HELD_BYTES: record.held_bytes,
                names.MIGRATION_PAUSE_MS: record.pause_ms,
                names.MIGRATION_PAUSE_STEPS: record.pause_steps,
                names.PHASE: types_pb2.Phase.Name(record.phase).removeprefix("PHASE_").lower(),
                names.TOKENS: record.tokens,
                names.MIGRATION_WAY: types_pb2.Way.Name(record.way).removeprefix("WAY_").lower(),
                names.MIGRATION_WAY_REASON: record.way_reason,
            }
        )
        if record.error:
            fail(span, record.error)
        span.end()
