"""Counters whose label values are known exist before their first event, which `increase()` would miss."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter

from frontend_svc.observer import FrontendMetrics
from frontend_svc.streams import StreamTable
from migration_svc.metrics import MigrationMetrics
from scheduler_svc.metrics import SchedulerMetrics
from tailrace.actions import PULL_OUTCOMES
from tailrace.cluster import Phase
from tailrace.records import PROFILES
from tailrace.store.store import TOMBSTONES
from tailrace.telemetry.incidents import LASTING_KINDS, TAKEN_NAME, UNREADABLE_KINDS
from tailrace.telemetry.metrics import ServiceRegistry, new_registry
from worker_agent.metrics import WorkerHistograms, WorkerMetrics

ROOT = Path(__file__).parents[2]
SOURCES = ("frontend_svc", "scheduler_svc", "monitor_svc", "migration_svc", "worker_agent", "tailrace")


@pytest.fixture(scope="module")
def registry() -> CollectorRegistry:
    """All services' metrics, before anything happened."""
    registry = CollectorRegistry()
    FrontendMetrics(registry, StreamTable(Phase.ANSWERING), list)
    MigrationMetrics(registry, lambda: 0, lambda: 0).keep_models({"m"})
    scheduler = SchedulerMetrics(registry)
    scheduler.in_force("pascal")
    scheduler.keep_members({"w": "m"}, {"f": "m"})
    return registry


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("tailrace_frontend_requests_total", {"outcome": "aborted"}),
        ("tailrace_frontend_rejected_outputs_total", {"cause": "stale_epoch"}),
        ("tailrace_frontend_recoveries_total", {"cause": "lost"}),
        ("tailrace_frontend_refused_requests_total", {"status": "401"}),
        ("tailrace_frontend_refused_requests_total", {"status": "429"}),
        ("tailrace_frontend_placements_total", {"by": "fallback"}),
        (
            "tailrace_migration_migrations_total",
            {"outcome": "aborted", "reason": "reasoning ended", "way": "live", "model": "m"},
        ),
        *(
            (
                "tailrace_migration_migrations_total",
                {"outcome": outcome, "reason": "reasoning ended", "way": "live", "model": "m"},
            )
            for outcome in ("gone", "unknown")
        ),
        ("tailrace_scheduler_refusals_total", {"model": "m"}),
        ("tailrace_scheduler_placed_tokens_total", {"model": "m"}),
        ("tailrace_scheduler_policy_errors_total", {"policy": "pascal", "point": "tick"}),
        ("tailrace_scheduler_actions_total", {"action": "Migrate", "outcome": "aborted"}),
    ],
)
def test_counters_exist_from_the_start(
    registry: CollectorRegistry, name: str, labels: dict[str, str]
) -> None:
    assert registry.get_sample_value(name, labels) == 0.0


def test_every_kind_of_unreadable_thing_is_counted_from_zero() -> None:
    """Whatever the sources pass to `unreadable` is a known kind, which each process exports."""
    named = set()
    for path in (p for folder in SOURCES for p in (ROOT / folder).rglob("*.py")):
        named |= set(re.findall(r"unreadable\(\s*\"([^\"]+)\"", path.read_text()))
    membership = (ROOT / "tailrace/store/membership.py").read_text()
    areas = re.findall(r'area == "(\w+)"|_value\("(\w+)"', membership)
    named |= {f"{either or other} record" for either, other in areas} | {f"{PROFILES.rstrip('/')} record"}
    named |= {f"{TOMBSTONES.rstrip('/')} record"}
    assert named | {TAKEN_NAME} == set(UNREADABLE_KINDS)
    registry = new_registry("monitor", "m0")
    for kind in UNREADABLE_KINDS:
        assert registry.get_sample_value("tailrace_unreadable_total", {"what": kind}) is not None
    for kind in LASTING_KINDS:
        assert registry.get_sample_value("tailrace_unreadable_records", {"what": kind}) is not None


def test_a_worker_counts_from_zero() -> None:
    metrics = WorkerMetrics(WorkerHistograms(CollectorRegistry()))
    assert metrics.finished == {"finished": 0, "failed": 0, "aborted": 0, "moved": 0}
    assert set(metrics.pulls) == set(metrics.copies) == set(PULL_OUTCOMES)


def test_what_serves_a_model_carries_its_name() -> None:
    registry = ServiceRegistry()
    Counter("tailrace_frontend_things", "Things.", ["kind"], registry=registry).labels("a")
    Counter("tailrace_cluster_things", "Things.", registry=registry)
    registry.model = "tiny"
    labels = {s.name: s.labels for metric in registry.collect() for s in metric.samples}
    assert labels["tailrace_frontend_things_total"] == {"kind": "a", "model": "tiny"}
    assert labels["tailrace_cluster_things_total"] == {}
