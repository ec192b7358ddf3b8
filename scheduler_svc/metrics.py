"""Metrics of the scheduler."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tailrace.actions import (
    PULL_OUTCOMES,
    Action,
    CopyPrefix,
    Migrate,
    Offer,
    ReturnPrompts,
    SetPool,
    SetStages,
)
from tailrace.control.runner import DecisionPoint
from tailrace.telemetry.incidents import LimitedLog

log = logging.getLogger(__name__)

# Seconds between two lines about the errors of a policy at a decision point.
_ERRORS_S: Final = 60.0
_SECONDS: Final = (10e-6, 20e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 50e-3, 0.1, 0.5)
# Of actions that were begun (actuator.py), besides those that any action may have.
_OUTCOMES: Final[Mapping[type[Action], Sequence[str]]] = {
    Migrate: ("committed", "aborted", "outdated"),
    Offer: ("committed", "aborted", "outdated"),
    ReturnPrompts: ("done", "outdated"),
    CopyPrefix: PULL_OUTCOMES,
    SetPool: ("done",),
    SetStages: ("done",),
}


class _ByModel(NamedTuple):
    """Counters of a model, or of all."""

    tokens: Counter
    cached_tokens: Counter
    pulls: Counter
    refusals: Counter
    refused_late: Counter


class SchedulerMetrics:
    """Hold one scheduler's metrics."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._errors = LimitedLog(log, _ERRORS_S)
        # Series of `placements` by instance and policy.
        self._placed: dict[str, dict[str, Counter]] = {}
        # Models by instance and by front end.
        self._of_instance: Mapping[str, str] = {}
        self._of_frontend: Mapping[str, str] = {}
        self._by_model: dict[str, _ByModel] = {}
        self.placements = Counter(
            "tailrace_scheduler_placements",
            "Requests placed.",
            ["policy", "instance", "model"],
            registry=registry,
        )
        self.placed_tokens = Counter(
            "tailrace_scheduler_placed_tokens",
            "Prompt tokens of requests placed.",
            ["model"],
            registry=registry,
        )
        self.placed_cached_tokens = Counter(
            "tailrace_scheduler_placed_cached_tokens",
            "Those that the chosen instance held according to the index, or was to pull.",
            ["model"],
            registry=registry,
        )
        self.pulls = Counter(
            "tailrace_scheduler_pulls",
            "Placements with a prefix to be pulled from another instance.",
            ["model"],
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
            "tailrace_scheduler_refusals",
            "Requests that no instance could take.",
            ["model"],
            registry=registry,
        )
        self.refused_late = Counter(
            "tailrace_scheduler_refused_late",
            "Requests refused on arrival because their first token would have come too late.",
            ["model"],
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
            "Questions that a policy answered badly or, several times in a row, late.",
            ["policy", "point"],
            registry=registry,
        )
        self.policy_suspended = Gauge(
            "tailrace_scheduler_policy_suspended",
            "1 while least_loaded decides because the policy that was set is suspended.",
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

        # From the start: of a series that appears with its first event, `increase()` misses that event.
        self._durations = {point: self.decision_seconds.labels(point.value) for point in DecisionPoint}
        for action, outcomes in _OUTCOMES.items():
            for outcome in (*outcomes, "refused", "failed", "dropped"):
                self.actions.labels(action.__name__, outcome)

    def in_force(self, policy: str) -> None:
        """Export the errors of the policy that decides from now on, although there are none yet."""
        for point in DecisionPoint:
            self.policy_errors.labels(policy, point.value)

    def observe_duration(self, point: DecisionPoint, seconds: float) -> None:
        """Record how long a call of the policy took."""
        self._durations[point].observe(seconds)

    def failed(self, policy: str, point: DecisionPoint, why: str) -> None:
        """Count a bad answer of a policy, and log it."""
        self.policy_errors.labels(policy, point.value).inc()
        self._errors.write(
            logging.ERROR, f"{policy} {point.value}", f"policy {policy} at {point.value}: {why}"
        )

    def placed(self, policy: str, instance_id: str, tokens: int, cached: int, pulled: bool) -> None:
        """Count a placement. `tokens`: of its prompt; `cached`: of these, those that need no prefill."""
        model = self._of_instance.get(instance_id, "")
        by_policy = self._placed.setdefault(instance_id, {})
        counter = by_policy.get(policy)
        if counter is None:
            counter = by_policy[policy] = self.placements.labels(policy, instance_id, model)
        counter.inc()
        series = self._series(model)
        series.tokens.inc(tokens)
        if cached:
            series.cached_tokens.inc(cached)
        if pulled:
            series.pulls.inc()

    def refused(self, frontend_id: str, late: bool) -> None:
        """Count a refusal. `late`: its first token would have come too late."""
        series = self._series(self._of_frontend.get(frontend_id, ""))
        (series.refused_late if late else series.refusals).inc()

    def keep_members(self, of_instance: Mapping[str, str], of_frontend: Mapping[str, str]) -> None:
        """Remove the series of other instances and models: each restart of a worker may have a new name.
        Begin those of new models.

        `of_instance`, `of_frontend`: the model of each.
        """
        labelled = {name: self._of_instance.get(name, "") for name in self._placed}
        for gone, model in labelled.items():
            if of_instance.get(gone) != model:
                for policy in self._placed.pop(gone):
                    self.placements.remove(policy, gone, model)
        models = {*of_instance.values(), *of_frontend.values()}
        for model in self._by_model.keys() - models:
            del self._by_model[model]
            for counter in self._counters:
                counter.remove(model)
        for model in models:
            self._series(model)
        self._of_instance, self._of_frontend = of_instance, of_frontend

    def _series(self, model: str) -> _ByModel:
        known = self._by_model.get(model)
        if known is None:
            known = self._by_model[model] = _ByModel(*(each.labels(model) for each in self._counters))
        return known

    @property
    def _counters(self) -> _ByModel:
        return _ByModel(
            self.placed_tokens, self.placed_cached_tokens, self.pulls, self.refusals, self.refused_late
        )
