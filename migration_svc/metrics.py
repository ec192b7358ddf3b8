"""Metrics of the migration service."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from itertools import product
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tailrace.handover import LABELS, label
from tailrace.v1 import migration_pb2, types_pb2

_PAUSE_BUCKETS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_OUTCOMES: Final = ("committed", "aborted", "gone", "unknown")
_WAYS: Final = ("live", "replay")


class MigrationMetrics:
    """Count migrations and their costs."""

    def __init__(
        self, registry: CollectorRegistry, open_now: Callable[[], int], waiting: Callable[[], int]
    ) -> None:
        self._ended = Counter(
            "tailrace_migration_migrations",
            "Migrations that ended, by outcome (committed, aborted, unknown; gone: the request had left its "
            "source), reason and way (live, replay).",
            ["outcome", "reason", "way", "model"],
            registry=registry,
        )
        self._bytes = Counter(
            "tailrace_migration_kv_bytes", "KV that migrations copied.", ["model"], registry=registry
        )
        self._held_bytes = Counter(
            "tailrace_migration_kv_held_bytes",
            "KV that migrations did not copy: the target's prefix cache held it.",
            ["model"],
            registry=registry,
        )
        self._pause = Histogram(
            "tailrace_migration_pause_seconds",
            "Time during which a migrated request generated no tokens.",
            ["model"],
            buckets=_PAUSE_BUCKETS,
            registry=registry,
        )
        self._duration = Histogram(
            "tailrace_migration_duration_seconds",
            "From request to commit.",
            ["model"],
            buckets=(*_PAUSE_BUCKETS, 10.0, 20.0),
            registry=registry,
        )
        self._by_model: Sequence[Counter | Histogram] = (
            self._bytes,
            self._held_bytes,
            self._pause,
            self._duration,
        )
        # By model: the outcome, reason and way of each of its series of `_ended`.
        self._series: dict[str, set[tuple[str, str, str]]] = {}
        opened = Gauge("tailrace_migration_open_migrations", "Migrations under way.", registry=registry)
        opened.set_function(open_now)
        queued = Gauge("tailrace_migration_waiting_migrations", "Migrations that wait.", registry=registry)
        queued.set_function(waiting)

    def keep_models(self, models: Set[str]) -> None:
        """Remove the series of other models, and begin those of new ones."""
        for model in self._series.keys() - models:
            for labels in self._series.pop(model):
                self._ended.remove(*labels, model)
            for metric in self._by_model:
                metric.remove(model)
        for model in models - self._series.keys():
            self._begin(model)

    def _begin(self, model: str) -> None:
        # `increase()` misses the first event of a series that it begins.
        self._series[model] = set(product(_OUTCOMES, LABELS, _WAYS))
        for labels in self._series[model]:
            self._ended.labels(*labels, model)
        for metric in self._by_model:
            metric.labels(model)

    def ended(self, record: migration_pb2.MigrationRecord, model: str) -> None:
        """Count a migration that has ended, of a request of this model."""
        committed = record.state == types_pb2.MIGRATION_STATE_COMMITTED
        # Live unless the target reported otherwise.
        way = "replay" if record.way == types_pb2.WAY_REPLAY else "live"
        outcome = types_pb2.MigrationState.Name(record.state).removeprefix("MIGRATION_STATE_").lower()
        labels = (outcome, label(record.reason), way)
        if model not in self._series:
            # Its last instance has left meanwhile.
            self._begin(model)
        self._series[model].add(labels)
        self._ended.labels(*labels, model).inc()
        self._bytes.labels(model).inc(record.bytes)
        self._held_bytes.labels(model).inc(record.held_bytes)
        if committed:
            self._pause.labels(model).observe(record.pause_ms / 1000)
            self._duration.labels(model).observe(record.closed_s - record.opened_s)
