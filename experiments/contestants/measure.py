"""Measure one contestant on one ground."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from experiments.contestants.chunk_sizes import ChunkSizes, with_chunks
from experiments.policies.grounds import Case, scenario_of
from experiments.policies.measure import COUNTED
from simulator.records import SimResult
from simulator.scenario import Scenario, figures_of
from simulator.simulation import simulate
from simulator.workloads.resolve import resolve_workload
from tailrace.policy.deployment import Deployment

FIGURES: Final = ("attainment", "ttft_p99_s", "tpot_p99_s")


def measured(case: Case, traces: Path, seconds: float, seeds: int) -> dict[str, float]:
    """Return the figures of the counted requests."""
    scenario = scenario_of(case, traces, seconds, seeds)
    result = _simulated(scenario)
    arrived = sorted(result.requests, key=lambda r: r.arrival_s)
    first, last = (int(share * len(arrived)) for share in COUNTED)
    figures = figures_of(replace(result, requests=arrived[first:last]), scenario.slo).as_dict()
    return {name: float(figures[name]) for name in FIGURES}


def _simulated(scenario: Scenario) -> SimResult:
    """Simulate as `simulator.scenario.simulated` does, and give `ChunkSizes` its chunks."""
    setup, slo = scenario.setup(), scenario.slo
    spec = setup.apply(replace(scenario.fleet.spec(), tpot_target_s=slo.reading_s))
    if setup.kind is ChunkSizes:
        spec = with_chunks(spec)
    return simulate(
        spec,
        resolve_workload(scenario.workload, scenario.options).requests,
        setup.policy(Deployment(slo, scenario.fleet.kinds()[0][0])),
        setup.intra(slo),
        seed=scenario.options.seed,
        sample_interval_s=10.0,
    )
