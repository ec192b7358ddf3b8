"""Metrics of the cluster's membership. Every control service exports them, so scraping any one is enough."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tailrace.cluster import Pool
from tailrace.members import Members
from tailrace.rollout.record import RolloutState
from tailrace.telemetry.metrics import gauge_by

_NO_POOL: Final = "none"
_KINDS: Final = ("frontend", "scheduler", "monitor", "migration")


class MembershipMetrics(Collector):
    """Gauges `tailrace_cluster_*`."""

    def __init__(self, members: Members) -> None:
        self._members = members

    def collect(self) -> Iterable[Metric]:
        """Yield all metric families."""
        members = self._members
        pools = Counter(dict.fromkeys((*(pool.value for pool in Pool), _NO_POOL), 0))
        pools.update(_pool(members.pools.get(name)) for name in members.instances)
        yield gauge_by(
            "tailrace_cluster_pool_instances", "Instances by pool; none: in no pool.", "pool", pools
        )
        kinds = Counter(dict.fromkeys(_KINDS, 0))
        kinds.update(kind for kind, _ in members.services)
        yield gauge_by("tailrace_cluster_services", "Services by kind.", "kind", kinds)
        present = members.instances.keys()
        yield GaugeMetricFamily("tailrace_cluster_instances", "Instances.", value=len(present))
        yield GaugeMetricFamily(
            "tailrace_cluster_draining_instances",
            "Instances that get nothing new.",
            value=len(members.draining & present),
        )
        yield GaugeMetricFamily(
            "tailrace_cluster_suspect_instances",
            "Instances whose lease expired without a withdrawal; held for a while, not dropped.",
            value=len(members.suspects),
        )
        states = Counter({state.value: 0 for state in RolloutState})
        states.update(rollout.state.value for rollout in members.rollouts.values())
        yield gauge_by(
            "tailrace_cluster_rollouts", "Models by the state of their last rollout.", "state", states
        )


def _pool(pool: Pool | None) -> str:
    return _NO_POOL if pool is None else pool.value
