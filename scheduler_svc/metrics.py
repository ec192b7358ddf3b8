"""Metrics of the scheduler."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tailrace.control.runner import Point

_SECONDS: Final = (10e-6, 20e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 50e-3, 0.1, 0.5)


class SchedulerMetrics:
    """Hold one scheduler's metrics."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.placements = Counter(
            "tailrace_scheduler_placements",
            "Requests placed.",
            ["policy", "instance"],
            registry=registry,
        )
        self.placed_tokens = Counter(
            "tailrace_scheduler_placed_tokens", "Prompt tokens of requests placed.", registry=registry
        )
        self.placed_cached_tokens = Counter(
            "tailrace_scheduler_placed_cached_tokens",
            "Those that the chosen instance held according to the index, or was to pull.",
            registry=registry,
        )
        self.pulls = Counter(
            "tailrace_scheduler_pulls",
            "Placements with a prefix to be pulled from another instance.",
            registry=registry,
        )
        self.cache_index_blocks = Gauge(
            "tailrace_scheduler_cache_index_blocks",
            "Distinct KV blocks that some instance holds on its device.",
            registry=registry,
        )
        self.cache_snapshots = Gauge(
            "tailrace_scheduler_cache_snapshots",
            "Full cache listings fetched because an update was missing.",
            registry=registry,
        )
        self.pending_placements = Gauge(
            "tailrace_scheduler_pending_placements",
            "Requests placed but not yet in a worker report.",
            registry=registry,
        )
        self.refusals = Counter(
            "tailrace_scheduler_refusals", "Requests that no instance could take.", registry=registry
        )
        self.refused_late = Counter(
            "tailrace_scheduler_refused_late",
            "Requests refused on arrival because their first token would have come too late.",
            registry=registry,
        )
        self.decision_seconds = Histogram(
            "tailrace_scheduler_decision_seconds",
            "Time of one decision.",
            ["point"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.actions = Counter(
            "tailrace_scheduler_actions",
            "Actions decided by policies, by outcome.",
            ["action", "outcome"],
            registry=registry,
        )
        self.policy_errors = Counter(
            "tailrace_scheduler_policy_errors",
            "Policy calls that raised or named a disallowed instance.",
            ["policy", "point"],
            registry=registry,
        )
        self.shadow_decisions = Counter(
            "tailrace_scheduler_shadow_decisions",
            "Decisions of the active policy, compared with the shadow policy's.",
            ["policy", "shadow", "point", "verdict"],
            registry=registry,
        )
        self.leading = Gauge("tailrace_scheduler_leading", "1 while this scheduler leads.", registry=registry)
        self.monitor_connected = Gauge(
            "tailrace_scheduler_monitor_connected", "1 while a monitor's watch is open.", registry=registry
        )

    def observe_duration(self, point: Point, seconds: float) -> None:
        """Record how long a call of the policy took."""
        self.decision_seconds.labels(point.value).observe(seconds)

    def failed(self, policy: str, point: Point) -> None:
        """Count a call of the policy that raised, or placed on an instance that it must not use."""
        self.policy_errors.labels(policy, point.value).inc()
