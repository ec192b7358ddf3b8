"""The day, and what a fleet does on it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from experiments.desired_instances.following import SAMPLE_S, Following, Sample
from simulator.cluster import ClusterSpec
from simulator.records import RequestRecord
from simulator.request import SimRequest
from simulator.setups import setup_for
from simulator.simulation import simulate
from simulator.workloads.traces import load_azure
from tailrace.perf.measured import Measured
from tailrace.policy.deployment import Deployment
from tailrace.profiles import load_profile
from tailrace.scaling import Scaling
from tailrace.slo import Slo

TRACE: Final = Path("traces/azure_llm_2023/AzureLLMInferenceTrace_conv.csv")
# Parts of the recorded hour whose rate and lengths are kept.
PARTS: Final = 60
# Of the day, for the picture.
BINS: Final = 96


@dataclass(frozen=True, slots=True)
class Settings:
    """What is simulated."""

    data: Path
    profile: str
    policy: str
    rate_per_s: float
    hours: float
    startup_s: float
    ttft_s: float
    tpot_s: float
    seed: int
    most: int

    @property
    def slo(self) -> Slo:
        """Return the SLOs."""
        return Slo(ttft_s=self.ttft_s, tpot_s=self.tpot_s)

    @property
    def day_s(self) -> float:
        """Return the length of the day."""
        return 3600.0 * self.hours


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a fleet did."""

    requests: int
    attainment: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p99_s: float
    instance_hours: float
    most_instances: int
    # Changes of the desired number.
    changes: int
    migrations: int
    cpu_s: float
    # By bin of the day: arrivals per second, and the share of requests that met the SLOs.
    rates: list[float]
    met: list[float]
    samples: list[Sample]


def day(settings: Settings) -> list[SimRequest]:
    """Return the requests of the day. Raise WorkloadError."""
    recorded = load_azure(settings.data / TRACE).requests
    rng = np.random.default_rng(settings.seed)
    span_s = recorded[-1].arrival_s
    parts: list[list[SimRequest]] = [[] for _ in range(PARTS)]
    for request in recorded:
        parts[min(int(request.arrival_s / span_s * PARTS), PARTS - 1)].append(request)
    part_s = settings.day_s / PARTS
    requests: list[SimRequest] = []
    for number, part in enumerate(parts):
        expected = len(part) / len(recorded) * settings.rate_per_s * settings.day_s
        times = number * part_s + np.sort(rng.random(rng.poisson(expected))) * part_s
        for at_s, which in zip(
            times.tolist(), rng.integers(len(part), size=len(times)).tolist(), strict=True
        ):
            requests.append(replace(part[which], request_id=f"r{len(requests)}", arrival_s=at_s))
    return requests


def run(settings: Settings, instances: int | None, profiled: bool = True) -> Outcome:
    """Simulate a fixed fleet; None: one that follows the desired number."""
    began_s = time.process_time()
    requests = day(settings)
    profile = load_profile(settings.profile)
    setup = setup_for(settings.policy)
    spec = setup.apply(ClusterSpec.uniform(instances or settings.most, profile))
    policy = setup.policy(Deployment(settings.slo, profile))
    following = None
    if instances is None:
        scaling = Scaling(most=settings.most)
        measured = Measured.of_profile(profile, spec.instances[0].chunk_budget_tokens) if profiled else None
        first = [each.instance_id for each in spec.instances[: settings.most // 2]]
        policy = following = Following(policy, scaling, settings.slo, settings.startup_s, first, measured)
    result = simulate(spec, requests, policy, setup.intra(settings.slo), seed=settings.seed)
    records, samples = result.requests, following.samples if following is not None else []
    paid = [sample.paid for sample in samples if sample.at_s < settings.day_s]
    ttft = [r.ttft_s for r in records if r.ttft_s is not None]
    desired = [sample.desired for sample in samples]
    rates, met = by_bin(settings, records)
    return Outcome(
        requests=len(records),
        attainment=sum(map(settings.slo.met_by, records)) / len(records),
        ttft_p50_s=float(np.percentile(ttft, 50)),
        ttft_p99_s=float(np.percentile(ttft, 99)),
        tpot_p99_s=float(np.percentile([r.tpot_s for r in records if r.tpot_s is not None], 99)),
        instance_hours=instances * settings.hours if instances else sum(paid) * SAMPLE_S / 3600.0,
        most_instances=instances or max(paid),
        changes=int(np.count_nonzero(np.diff(desired))) if desired else 0,
        migrations=len(result.migrations),
        cpu_s=time.process_time() - began_s,
        rates=rates,
        met=met,
        samples=samples[:: max(1, len(samples) // 1_000)],
    )


def by_bin(settings: Settings, records: Sequence[RequestRecord]) -> tuple[list[float], list[float]]:
    """Return the arrivals per second, and the share of requests in SLO, by part of the day."""
    bin_s = settings.day_s / BINS
    bins = np.minimum([int(r.arrival_s / bin_s) for r in records], BINS - 1)
    arrived = np.bincount(bins, minlength=BINS)
    met = np.bincount(bins, weights=[settings.slo.met_by(r) for r in records], minlength=BINS)
    return (arrived / bin_s).tolist(), (met / np.maximum(arrived, 1)).tolist()
