"""Run a simulation: the one entry point of the simulator's core."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from simulator.cluster import ClusterSpec
from simulator.records import SimResult
from simulator.request import SimRequest
from simulator.simulation import Simulation
from tailrace.collector import collector_paused
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

    Equal arguments give equal results; `seed` sets when the first report is due. `progress` is called now
    and then with the share of requests done. Raises SimulationError if the policy names what does not exist,
    or leaves requests waiting for ever.
    """
    simulation = Simulation(spec, requests, policy, intra, seed=seed, sample_interval_s=sample_interval_s)
    with collector_paused():
        return simulation.run(progress)
