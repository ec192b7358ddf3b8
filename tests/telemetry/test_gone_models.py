"""The migration service keeps no series of models that have gone."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from migration_svc.metrics import MigrationMetrics
from tailrace.v1 import migration_pb2, types_pb2


def test_series_of_models_end_with_their_last_instance() -> None:
    registry = CollectorRegistry()
    metrics = MigrationMetrics(registry, lambda: 0, lambda: 0)
    metrics.keep_models({"kept"})
    before = generate_latest(registry)
    metrics.keep_models({"kept", "gone"})
    assert b'model="gone"' in generate_latest(registry)
    metrics.keep_models({"kept"})
    assert generate_latest(registry) == before
    # Of one that had begun before.
    record = migration_pb2.MigrationRecord(state=types_pb2.MIGRATION_STATE_UNKNOWN, reason="of a test")
    metrics.ended(record, "gone")
    assert b'model="gone",outcome="unknown"' in generate_latest(registry)
    metrics.keep_models({"kept"})
    assert generate_latest(registry) == before
