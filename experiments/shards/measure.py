"""Simulate one way to place requests, with one policy on one fleet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from experiments.scenarios import Scenario
from experiments.shards.leased import Leased
from experiments.shards.ways import ONE, WORKLOADS, Way
from simulator.cluster import ClusterSpec, ReportSpec
from simulator.records import Series
from simulator.request import SimRequest
from simulator.setups import setup_for
from simulator.simulation import simulate
from tailrace.policy.deployment import Deployment
from tailrace.profiles import load_profile
from tailrace.slo import Slo

# A rate is sustained if this share of requests meets its SLOs. At Arrow's 90%, queues already grow: a policy
# may let the longest prompts wait.
TARGET: Final = 0.99
# Instances on which the sustainable rate is searched, and the step of the search.
SEARCHED: Final = 16
_STEP: Final = 1.1
_SEARCH_SEED: Final = 1_000
_MAX_STEPS: Final = 40
_SAMPLE_S: Final = 0.5
# Share of the duration of arrivals that is not counted.
_WARM_UP: Final = 1.0 / 3.0


@dataclass(frozen=True, slots=True)
class Case:
    """One simulation. `load`: share of the rate that the policy sustains with one scheduler."""

    workload: str
    policy: str
    instances: int
    load: float
    rate_per_s: float
    way: Way
    seed: int
    # Duration of arrivals.
    seconds: float
    front_ends: int

    @property
    def requests(self) -> int:
        """Number of requests."""
        return round(self.seconds * self.rate_per_s)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Figures of the requests that arrived after the warm-up. Times in seconds."""

    case: Case
    requests: int
    # Share of requests that met their SLOs, and times the rate: requests per second.
    attained: float
    goodput_per_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    # From the arrival to the first token of any kind; the same as TTFT without reasoning.
    first_token_p99_s: float
    tpot_p99_s: float
    # Standard deviation of the used KV over instances, divided by their mean; averaged over time.
    imbalance: float
    migrations: int
    # Share of the prompt tokens found in a prefix cache.
    cached: float
    # Calls of a scheduler per placement.
    calls: float


def measure(case: Case) -> Outcome:
    """Simulate one case."""
    scenario = WORKLOADS[case.workload]
    setup, profile = setup_for(case.policy), load_profile(scenario.profile)
    spec = ClusterSpec.uniform(case.instances, profile, prefix_caching=case.workload == "sessions")
    spec = setup.apply(replace(spec, report=ReportSpec(case.way.report_s)))
    deployment = Deployment(Slo(*scenario.strictest_slo()), profile)
    policy = case.way.policy(setup, deployment, spec, case.front_ends)
    requests = draw(scenario, case)
    result = simulate(
        spec, requests, policy, setup.intra(deployment.slo), seed=case.seed, sample_interval_s=_SAMPLE_S
    )
    from_s = _WARM_UP * case.seconds
    counted = [record for record in result.requests if record.arrival_s >= from_s]
    done = [record for record in counted if record.finish_s is not None]
    ttft = np.array([r.ttft_s for r in done], dtype=np.float64)
    first_token = np.array([(r.first_token_s or 0.0) - r.arrival_s for r in done], dtype=np.float64)
    tpot = np.array([r.tpot_s for r in done], dtype=np.float64)
    attained = sum(map(scenario.meets_slos, counted)) / len(counted)
    calls = case.way.calls if not isinstance(policy, Leased) else policy.calls / len(requests)
    return Outcome(
        case=case,
        requests=len(counted),
        attained=attained,
        goodput_per_s=attained * case.rate_per_s,
        ttft_p50_s=float(np.quantile(ttft, 0.5)),
        ttft_p99_s=float(np.quantile(ttft, 0.99)),
        first_token_p99_s=float(np.quantile(first_token, 0.99)),
        tpot_p99_s=float(np.quantile(tpot, 0.99)),
        imbalance=imbalance(result.series, from_s, case.seconds),
        migrations=sum(r.migrations for r in done),
        cached=sum(r.cached_tokens for r in counted) / sum(r.prompt_tokens for r in counted),
        calls=calls,
    )


def draw(scenario: Scenario, case: Case) -> Sequence[SimRequest]:
    """Return the requests of a case: the same for all ways."""
    return scenario.draw(case.requests, case.rate_per_s, case.seed, None)


def imbalance(series: Series, from_s: float, to_s: float) -> float:
    """Return the coefficient of variation of the used KV over instances, averaged over the samples between
    two times; 0 if nothing was used."""
    used = series.kv_used_tokens[(series.times_s >= from_s) & (series.times_s <= to_s)]
    means = used.mean(axis=1)
    busy = means > 0.0
    return float((used.std(axis=1)[busy] / means[busy]).mean()) if busy.any() else 0.0


def sustained_rate(workload: str, policy: str, seconds: float) -> float:
    """Return the highest rate per instance, in steps of 10%, at which one scheduler over 16 instances meets
    the SLOs of 99% of requests. Raise RuntimeError if there is none."""

    def holds(rate_per_s: float) -> bool:
        case = Case(workload, policy, SEARCHED, 1.0, rate_per_s, ONE, _SEARCH_SEED, seconds, 1)
        return measure(case).attained >= TARGET

    scenario = WORKLOADS[workload]
    rate = scenario.first_rate_per_s * SEARCHED / scenario.instances
    step = _STEP if holds(rate) else 1.0 / _STEP
    for _ in range(_MAX_STEPS):
        following = rate * step
        if holds(following) == (step < 1.0):
            return (following if step < 1.0 else rate) / SEARCHED
        rate = following
    raise RuntimeError(f"{workload}: no limit of {policy} up or down to {rate:g} requests/s")
