"""Run one policy on one workload and fleet, as described by a user, in any process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import PurePath
from typing import Final

import numpy as np

from simulator.cluster import ClusterSpec
from simulator.goodput import attainment, offered_rate_per_s, tail_by_bin
from simulator.records import MigrationOutcome, MigrationRecord, Series, SimResult
from simulator.setups import Setup, setup_for
from simulator.simulation import simulate
from simulator.workloads.base import Workload
from simulator.workloads.resolve import WorkloadOptions, resolve_workload
from tailrace.control.admission import TtftAdmission
from tailrace.perf.length_penalty import load_length_penalty
from tailrace.policy.deployment import Deployment
from tailrace.policy.parameters import Value
from tailrace.profiles import Profile, load_profile
from tailrace.slo import Slo

# Samples of a run's time series: enough for a plot, and few enough for a web page.
_SAMPLES = 240
_GIB: Final = 1024**3
# Of a fleet whose number is not given.
INSTANCES: Final = 8
# The default of `InstanceSpec.host_kv_bytes`.
HOST_KV_GIB: Final = 256.0


def kinds_of(text: str, instances: int | None) -> list[tuple[str, int]]:
    """Return the names of profiles and how many instances have each: `NAME:COUNT,...`, or one name.

    `instances` is the number in all; None: that of the text, else INSTANCES. Raise ValueError.
    """
    named: list[tuple[str, int]] = []
    for part in text.split(","):
        name, _, count = part.strip().rpartition(":")
        if name and count.removeprefix("-").isdecimal() and int(count) < 1:
            raise ValueError(f"{part.strip()}: COUNT must be at least 1")
        if not (name and count.isdecimal()):
            break
        named.append((name, int(count)))
    else:
        total = sum(count for _, count in named)
        if instances not in (None, total):
            raise ValueError(f"{text} has {total} instances, not {instances}")
        return named
    if "," in text:
        raise ValueError(f"{text}: give NAME:COUNT for each kind of instance")
    return [(text, INSTANCES if instances is None else instances)]


@dataclass(frozen=True, slots=True)
class SimulatedFleet:
    """A fleet of instances, as a user describes it."""

    # Name of a built-in profile, or the path of a JSON file; likewise for the penalty. Of unequal instances,
    # NAME:COUNT for each kind, separated by commas.
    profile: str
    instances: int
    penalty: str = "none"
    # For policies that start with pools; None: the default of their setups.
    prefill_instances: int | None = None
    # Whether prefixes stay cached, for workloads that name their blocks.
    prefix_caching: bool = False
    # Host memory per instance for KV, and whether prefixes evicted from the device stay in it.
    host_kv_gib: float = HOST_KV_GIB
    host_caching: bool = False

    def kinds(self) -> list[tuple[Profile, int]]:
        """Return the profiles, and how many instances have each. Raise ProfileError."""
        return [(load_profile(name), count) for name, count in kinds_of(self.profile, self.instances)]

    def spec(self) -> ClusterSpec:
        """Return the cluster to simulate. Raise ProfileError or LengthPenaltyError."""
        return ClusterSpec.of_kinds(
            self.kinds(),
            penalty=load_length_penalty(self.penalty),
            prefix_caching=self.prefix_caching,
            host_kv_bytes=round(self.host_kv_gib * _GIB),
            host_caching=self.host_caching,
        )


@dataclass(frozen=True, slots=True)
class Scenario:
    """What to simulate. Can be pickled; equal scenarios give equal outcomes."""

    policy: str
    workload: str
    options: WorkloadOptions
    fleet: SimulatedFleet
    slo: Slo
    # One of `simulator.setups.PREDICTIONS`; None: the default of the policy's setup.
    predicts: str | None = None
    # (name, value) of the policy's parameters that differ from their defaults.
    parameters: tuple[tuple[str, Value], ...] = ()

    @property
    def workload_name(self) -> str:
        """Return the workload for display: files without their directories."""
        parts = (part.strip().partition(":") for part in self.workload.split(","))
        return ", ".join(f"{form}{colon}{PurePath(path).name}" for form, colon, path in parts)

    def setup(self) -> Setup:
        """Return the policy's setup with the user's choices. Raise UnknownSetupError or ParameterError."""
        setup = setup_for(self.policy).with_parameters(dict(self.parameters))
        if self.predicts is not None:
            setup = replace(setup, predicts=self.predicts)
        if self.fleet.prefill_instances is not None:
            setup = setup.with_pools(self.fleet.prefill_instances, self.fleet.instances)
        return setup


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of a run. Times are in seconds, over finished requests unless stated otherwise."""

    requests: int
    finished: int
    refused: int
    # From the first to the last arrival; NaN if that is no time, and so is the goodput.
    rate_per_s: float
    # Over all requests.
    attainment: float
    goodput_per_s: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    qoe_mean: float
    latency_p50_s: float
    latency_p99_s: float
    # Reasoning and answers, from the first arrival to the end.
    tokens_per_s: float
    migrations: int
    migrated_bytes: int
    # Longest time that a migration kept a request from decoding.
    pause_max_s: float
    swapped: int
    recomputed: int
    # Share of the prompt tokens found in a prefix cache, and share loaded from host memory.
    cached_share: float
    loaded_share: float
    pool_changes: int
    stage_changes: int
    # From the first arrival to the last token.
    makespan_s: float

    def as_dict(self) -> dict[str, int | float]:
        """Return the figures by name, in this order."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, slots=True)
class Detail:
    """Time series and migrations of one run, for the charts of a report."""

    migrations: Sequence[MigrationRecord]
    series: Series
    kv_capacity_tokens: int
    end_s: float


@dataclass(frozen=True, slots=True)
class ScenarioResult:
    """The result of a scenario."""

    scenario: Scenario
    # A description of the origin of the requests.
    source: str
    figures: Figures
    # The reason for the first refusal; "": no request was refused.
    refusal: str
    # (reasoning tokens, prompt tokens, TTFT in seconds) of finished requests.
    points: Sequence[tuple[int, int, float]]
    detail: Detail | None

    @property
    def tails(self) -> dict[int, float]:
        """Return the tail TTFT in seconds by reasoning length, with PASCAL's bins and percentiles."""
        return tail_by_bin((reasoning, ttft_s) for reasoning, _, ttft_s in self.points)


def run_brief(scenario: Scenario) -> ScenarioResult:
    """Simulate a scenario without its detail, so that little is sent between processes."""
    return replace(run_scenario(scenario), detail=None)


def run_scenario(scenario: Scenario, progress: Callable[[float], None] | None = None) -> ScenarioResult:
    """Simulate a scenario; `progress` is called with the share of requests done.

    Raise WorkloadError, UnknownSetupError, ParameterError, ProfileError or LengthPenaltyError for invalid
    input, and SimulationError for a policy that cannot continue.
    """
    workload = _workload(scenario.workload, scenario.options)
    result = simulated(scenario, progress)
    instance = scenario.fleet.spec().instances[0]
    return ScenarioResult(
        scenario=scenario,
        source=workload.source,
        figures=figures_of(result, scenario.slo),
        refusal=next((record.refused for record in result.requests if record.refused), ""),
        points=[
            (r.reasoning_tokens, r.prompt_tokens, r.ttft_s) for r in result.requests if r.ttft_s is not None
        ],
        detail=Detail(
            result.migrations, result.series, instance.kv_blocks * instance.block_tokens, result.end_s
        ),
    )


def simulated(scenario: Scenario, progress: Callable[[float], None] | None = None) -> SimResult:
    """Simulate a scenario, and return all that happened. Raise as `run_scenario`."""
    workload = _workload(scenario.workload, scenario.options)
    setup = scenario.setup()
    spec = replace(scenario.fleet.spec(), tpot_target_s=scenario.slo.reading_s)
    profile, penalty = scenario.fleet.kinds()[0][0], load_length_penalty(scenario.fleet.penalty)
    mean_output = float(np.mean([request.output_tokens for request in workload.requests]))
    slo = scenario.slo
    return simulate(
        setup.apply(spec, mean_output),
        workload.requests,
        setup.policy(Deployment(slo, profile, penalty)),
        setup.intra(slo),
        seed=scenario.options.seed,
        sample_interval_s=_sample_interval_s(workload),
        progress=progress,
        admission=TtftAdmission.of(slo),
    )


def figures_of(result: SimResult, slo: Slo) -> Figures:
    """Compute the figures of a finished simulation."""
    records = result.requests
    done = [r for r in records if r.finish_s is not None]
    ttft, tpot = _column([r.ttft_s for r in done]), _column([r.tpot_s for r in done])
    latency = _column([r.latency_s for r in done])
    start_s = min(r.arrival_s for r in records)
    makespan_s = max((r.finish_s for r in done if r.finish_s is not None), default=start_s) - start_s
    committed = [m for m in result.migrations if m.outcome is MigrationOutcome.COMMITTED]
    met, rate = attainment(records, slo), offered_rate_per_s(records)
    tokens = sum(r.output_tokens for r in done)
    prompt_tokens = sum(r.prompt_tokens for r in records)
    return Figures(
        requests=len(records),
        finished=len(done),
        refused=sum(bool(r.refused) for r in records),
        rate_per_s=rate,
        attainment=met,
        goodput_per_s=rate * met,
        ttft_mean_s=float(ttft.mean()) if len(ttft) else float("nan"),
        ttft_p50_s=_percentile(ttft, 50),
        ttft_p95_s=_percentile(ttft, 95),
        ttft_p99_s=_percentile(ttft, 99),
        tpot_p50_s=_percentile(tpot, 50),
        tpot_p99_s=_percentile(tpot, 99),
        qoe_mean=float(_column([r.qoe for r in done]).mean()) if done else float("nan"),
        latency_p50_s=_percentile(latency, 50),
        latency_p99_s=_percentile(latency, 99),
        tokens_per_s=tokens / makespan_s if makespan_s > 0.0 else 0.0,
        migrations=len(committed),
        migrated_bytes=sum(m.bytes_sent for m in committed),
        pause_max_s=max((m.pause_s for m in committed), default=0.0),
        swapped=sum(r.preemptions_swapped for r in records),
        recomputed=sum(r.preemptions_recomputed for r in records),
        cached_share=sum(r.cached_tokens for r in records) / prompt_tokens,
        loaded_share=sum(r.loaded_tokens for r in records) / prompt_tokens,
        # The first entry of each instance, and of the stages, is the initial one.
        pool_changes=len(result.series.pools) - len(result.series.instance_ids),
        stage_changes=len(result.series.stages) - 1,
        makespan_s=makespan_s,
    )


# Policies are compared on equal requests, so a process resolves the same workloads repeatedly.
@lru_cache(maxsize=4)
def _workload(spec: str, options: WorkloadOptions) -> Workload:
    return resolve_workload(spec, options)


def _sample_interval_s(workload: Workload) -> float:
    span_s = workload.requests[-1].arrival_s - workload.requests[0].arrival_s
    return max(span_s / _SAMPLES, 0.01)


def _column(values: Sequence[float | None]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array([value for value in values if value is not None], np.float64)


def _percentile(values: np.ndarray[tuple[int], np.dtype[np.float64]], percent: float) -> float:
    return float(np.percentile(values, percent)) if len(values) else float("nan")
