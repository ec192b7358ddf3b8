"""Export the desired number of instances of each model (tailrace/scaling.py), for KEDA and the like."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Final

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tailrace.cluster import InstanceState
from tailrace.control.active_policy import ActivePolicy
from tailrace.control.reported_cluster import ReportedCluster
from tailrace.members import Members
from tailrace.model_identity import covers
from tailrace.perf.steps import StepModel
from tailrace.scaling import DesiredInstances, Need, Scaling, need
from tailrace.telemetry.incidents import guarded

LOOP: Final = "desired instances"
_INTERVAL_S: Final = 1.0
# A front end asks twice a second for an instance for each request that has none.
_ASKED_S: Final = 3.0


class DesiredMetrics(Collector):
    """Gauges `tailrace_desired_instances` and `tailrace_active_instances` by model, of the leader alone.

    Every scheduler follows the load, so that the desired number survives a change of the leader.
    """

    def __init__(
        self,
        state: ReportedCluster,
        members: Members,
        active: ActivePolicy,
        scaling: Scaling,
        leading: asyncio.Event,
    ) -> None:
        self._state = state
        self._members = members
        self._active = active
        self._scaling = scaling
        self._leading = leading
        self._nominal = StepModel.of_profile(None)
        self._desired: dict[str, DesiredInstances] = {}
        # When an instance was last asked for in vain, by key of the model that was to answer.
        self._asked_s: dict[str, float] = {}
        state.keep_demand(scaling.window_s)

    async def run(self) -> None:
        """Follow the load; run until cancelled."""
        while True:
            self.sample(time.monotonic())
            await asyncio.sleep(_INTERVAL_S)

    def asked_in_vain(self, model_key: str, now_s: float) -> None:
        """Note that a request found no instance that may take it."""
        self._asked_s[model_key] = now_s

    def sample(self, now_s: float) -> None:
        """Update the desired number of each model."""
        self._asked_s = {key: at_s for key, at_s in self._asked_s.items() if at_s > now_s - _ASKED_S}
        models = self._models()
        self._desired = {model: each for model, each in self._desired.items() if model in models}
        for model in sorted(models):
            # One that cannot be computed must not keep the others from it.
            with guarded(LOOP, model):
                self._update(model, now_s)

    def collect(self) -> Iterable[Metric]:
        """Yield both metrics."""
        desired = GaugeMetricFamily(
            "tailrace_desired_instances",
            "Instances of a model that its load needs within the SLOs; exported by the leader.",
            labels=["model"],
        )
        active = GaugeMetricFamily(
            "tailrace_active_instances",
            "Instances of a model that take new requests; exported by the leader.",
            labels=["model"],
        )
        if self._leading.is_set():
            for model, each in self._desired.items():
                desired.add_metric([model], each.count)
                active.add_metric([model], self._active_instances(model))
        yield desired
        yield active

    def _update(self, model: str, now_s: float) -> None:
        needed = self._need(model, now_s)
        known = self._desired.get(model)
        if known is None:
            known = self._desired[model] = DesiredInstances(self._scaling, now_s)
        known.update(needed, self._active_instances(model), now_s)

    def _need(self, model: str, now_s: float) -> Need:
        instances, lengths = self._state.instances_of(model), self._state.demand(model, now_s)
        needed = need(instances, lengths, self._active.slo, self._scaling, self._nominal)
        return needed._replace(holding=max(needed.holding, self._is_waited_for(model)))

    def _is_waited_for(self, model: str) -> bool:
        """Return whether requests at this model's front ends wait for an instance."""
        keys = {
            service.model_key
            for (kind, _), service in self._members.services.items()
            if kind == "frontend" and service.model == model
        }
        return any(covers(key, asked) for key in keys for asked in self._asked_s)

    def _active_instances(self, model: str) -> int:
        return sum(i.state is InstanceState.ACTIVE for i in self._state.instances_of(model))

    def _models(self) -> set[str]:
        """Return the models of all instances, and those of front ends that no instance runs."""
        instances = self._members.instances.values()
        models = {record.model for record in instances}
        for (kind, _), service in self._members.services.items():
            runs = any(covers(service.model_key, record.model_identity.key) for record in instances)
            if kind == "frontend" and service.model and not runs:
                models.add(service.model)
        return models
