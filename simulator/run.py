"""Run a simulation: the one entry point of the simulator's core."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from simulator.cluster import ClusterSpec
from simulator.records import SimResult
from simulator.request import SimRequest
from tailrace.intra.base import IntraPolicy
from tailrace.policy.base import Policy


def simulate(
    spec: ClusterSpec,
    requests: Sequence[SimRequest],
    policy: Policy,
    intra: IntraPolicy,
    *,
    seed: int = 0,
    sample_interval_s: float | None = None,
    progress: Callable[[float], None] | None = None,
) -> SimResult:
    """Run all `requests` through the cluster and return what happened to them.

    Equal arguments give equal results. `progress` is called now and then with the share of requests done.
    """
    raise NotImplementedError
