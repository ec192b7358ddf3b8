"""Trace spans of KV transfers: a migration's copy rounds and its pause, and pulls of prefixes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailrace.telemetry import attributes
from tailrace.telemetry.tracing import Tracing, record_span, wall_ns
from tailrace.v1 import types_pb2

if TYPE_CHECKING:
    from worker_agent.migration.copying import Round


class TransferSpans:
    """Record spans after the fact, under the migration's span; does nothing if tracing is off."""

    def __init__(self, tracing: Tracing, instance_id: str) -> None:
        self._tracing = tracing
        self._tracer = tracing.tracer("worker")
        self._instance_id = instance_id

    def round_done(self, traceparent: str, done: Round) -> None:
        """Record a copy round."""
        if not self._tracing.continues(traceparent):
            return
        record_span(
            self._tracer,
            "pre-copy round" if done.state == types_pb2.MIGRATION_STATE_PRE_COPY else "stop-and-copy round",
            traceparent,
            wall_ns(done.began_s),
            wall_ns(done.ended_s),
            attributes={
                attributes.INSTANCE: self._instance_id,
                attributes.MIGRATION_ROUND: done.message.number,
                attributes.MIGRATION_BLOCKS: done.message.blocks,
                attributes.MIGRATION_BYTES: done.message.bytes,
            },
        )

    def pulled(
        self,
        traceparent: str,
        began_s: float,
        ended_s: float,
        holder_id: str,
        outcome: str,
        blocks: int,
        size: int,
    ) -> None:
        """Record a prefix pull from another worker, under its request's span."""
        if not self._tracing.continues(traceparent):
            return
        record_span(
            self._tracer,
            "pull prefix",
            traceparent,
            wall_ns(began_s),
            wall_ns(ended_s),
            attributes={
                attributes.INSTANCE: self._instance_id,
                attributes.PULL_HOLDER: holder_id,
                attributes.OUTCOME: outcome,
                attributes.MIGRATION_BLOCKS: blocks,
                attributes.MIGRATION_BYTES: size,
            },
        )

    def paused(self, traceparent: str, since_s: float, pause_s: float) -> None:
        """Record the pause, from when the source paused the request until this instance may emit."""
        if not self._tracing.continues(traceparent):
            return
        record_span(
            self._tracer,
            "pause",
            traceparent,
            wall_ns(since_s),
            wall_ns(since_s + pause_s),
            attributes={
                attributes.INSTANCE: self._instance_id,
                attributes.MIGRATION_PAUSE_MS: pause_s * 1000,
            },
        )
