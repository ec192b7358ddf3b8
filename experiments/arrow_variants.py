"""Simulate Arrow as in the paper, and its variants (docs/policy-arrow.md).

- *Bursts of answers*: three instances, of which two prefill initially, each with KV for 2, 8 or 32 of the
longest requests. Short prompts, answers of 90 to 720 tokens: 10 s at half the rate at which the KV of all
instances is full on average, 10 s at twice that rate, 30 s at half of it again.
- *Azure* (`--traces DIR`, the folder that contains `traces/`): those of `experiments.scenarios`, with
four instances, at 60, 85 and 110% of the rate that the best policy sustains.

Figures are the share of requests that met their SLOs, mean and half-width of the 95% interval over seeds.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.scenarios import SCENARIOS
from simulator.cluster import ClusterSpec
from simulator.estimate import estimate
from simulator.goodput import attainment
from simulator.parallel import Task, run_tasks
from simulator.records import SimResult
from simulator.request import SimRequest
from simulator.setups import setup_for
from simulator.simulation import simulate
from tailrace.policy.deployment import Deployment
from tailrace.policy.parameters import Value
from tailrace.profiles import load_profile
from tailrace.slo import Slo

VARIANTS: Final[Mapping[str, tuple[str, Mapping[str, Value]]]] = {
    "least_loaded, no pools": ("least_loaded", {}),
    "static pools": ("static_pools", {}),
    "arrow": ("arrow", {}),
    "room=filter": ("arrow", {"room": "filter"}),
    "kv_wait=true": ("arrow", {"kv_wait": True}),
    "flips=attainment": ("arrow", {"flips": "attainment"}),
    "kv_wait=true flips=attainment": ("arrow", {"kv_wait": True, "flips": "attainment"}),
    "the same, room=filter": ("arrow", {"kv_wait": True, "flips": "attainment", "room": "filter"}),
}
PROFILE: Final = "llama-3.1-8b-h100"
# Bursts of answers.
_KV_REQUESTS: Final = (2, 8, 32)
_PROMPT: Final = (50, 90)
_ANSWER: Final = (90, 720)
_LONGEST: Final = _PROMPT[1] + _ANSWER[1]
_PHASES: Final = ((10.0, 0.5), (10.0, 2.0), (30.0, 0.5))
_BURST_SLO: Final = Slo(2.0, 0.15)
# Azure: requests per second at 60, 85 and 110% of what the best policy sustains (docs/policy-tailrace.md).
_AZURE_RATES: Final[Mapping[str, Sequence[float]]] = {
    "azure-code": (45.0, 64.0, 83.0),
    "azure-conv": (90.0, 128.0, 165.0),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of one run."""

    attained: float
    flips: int
    # Of requests that arrived after the burst.
    attained_after: float | None = None


def burst_of_answers(kv_requests: int, variant: str, seed: int) -> Outcome:
    """Simulate three instances, each with KV for this many of the longest requests."""
    profile = load_profile(PROFILE)
    spec = ClusterSpec.uniform(3, profile, kv_capacity_tokens=kv_requests * (-(-_LONGEST // 16) + 1) * 16)
    # Mean KV tokens of a request, the number of such requests that fill an instance, and the time of a step.
    mean_answer = sum(_ANSWER) / 2
    mean_tokens = sum(_PROMPT) / 2 + mean_answer / 2
    batch = kv_requests * _LONGEST / mean_tokens
    decode = profile.decode
    step_ms = decode.base_ms + batch * (decode.ms_per_request + decode.ms_per_kv_token * mean_tokens)
    full_per_s = 3 * batch / (mean_answer * step_ms / 1e3)
    rng = random.Random(seed)
    requests: list[SimRequest] = []
    at_s = begin_s = 0.0
    for seconds, load in _PHASES:
        at_s = begin_s + rng.expovariate(load * full_per_s)
        while at_s < begin_s + seconds:
            requests.append(
                SimRequest(f"r{len(requests)}", at_s, rng.randint(*_PROMPT), 0, rng.randint(*_ANSWER))
            )
            at_s += rng.expovariate(load * full_per_s)
        begin_s += seconds
    after_s = _PHASES[0][0] + _PHASES[1][0]
    result = _simulate(spec, requests, variant, _BURST_SLO, seed, prefill_instances=2)
    after_burst = [record for record in result.requests if record.arrival_s >= after_s]
    return Outcome(
        attainment(result.requests, _BURST_SLO), _flips(result), attainment(after_burst, _BURST_SLO)
    )


def azure(name: str, rate_per_s: float, traces: Path, variant: str, seed: int) -> Outcome:
    """Simulate a part of the trace, at a position drawn from the seed."""
    scenario = next(scenario for scenario in SCENARIOS if scenario.name == name)
    requests = scenario.draw(round(scenario.seconds * rate_per_s), rate_per_s, seed, traces)
    spec = ClusterSpec.uniform(scenario.instances, load_profile(scenario.profile))
    slo = Slo(*scenario.strictest_slo())
    result = _simulate(spec, requests, variant, slo, seed, prefill_instances=scenario.instances // 2)
    return Outcome(attainment(result.requests, slo), _flips(result))


def _simulate(
    spec: ClusterSpec,
    requests: Sequence[SimRequest],
    variant: str,
    slo: Slo,
    seed: int,
    prefill_instances: int,
) -> SimResult:
    policy, parameters = VARIANTS[variant]
    setup = setup_for(policy).with_parameters(parameters)
    setup = setup.with_pools(prefill_instances, len(spec.instances))
    deployment = Deployment(slo, spec.instances[0].profile)
    return simulate(
        setup.apply(spec),
        requests,
        setup.policy(deployment),
        setup.intra(slo),
        seed=seed,
        sample_interval_s=1.0,
    )


def _flips(result: SimResult) -> int:
    """Return the number of pool changes between prefill and decode work, including transitional pools."""
    assert result.series is not None
    return len(result.series.pools)


def _cell(values: Sequence[float]) -> str:
    found = estimate(values)
    if found.half_width is None:
        return f"{found.mean:.1%}"
    return f"{100 * found.mean:.1f} ± {100 * found.half_width:.1f}"


def main() -> None:
    """Print a table per scenario."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--traces", type=Path, help="folder that contains traces/; without it, Azure is skipped"
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", action="append", choices=["bursts", "azure-code", "azure-conv"])
    parser.add_argument("--processes", type=int)
    options = parser.parse_args()
    scenarios = options.only or ["bursts", "azure-code", "azure-conv"]
    seeds = range(1, options.seeds + 1)
    tasks: list[Task[Outcome]] = []
    columns: dict[str, list[str]] = {}
    if "bursts" in scenarios:
        columns["bursts"] = [f"KV for {n}" for n in _KV_REQUESTS]
        tasks += [
            Task(f"bursts/KV for {n}/{variant}/{seed}", burst_of_answers, (n, variant, seed))
            for n in _KV_REQUESTS
            for variant in VARIANTS
            for seed in seeds
        ]
    for name, rates in _AZURE_RATES.items():
        if name not in scenarios or options.traces is None:
            continue
        columns[name] = [f"{rate:g}/s" for rate in rates]
        tasks += [
            Task(
                f"{name}/{rate:g}/s/{variant}/{seed}",
                azure,
                (name, rate, options.traces, variant, seed),
            )
            for rate in rates
            for variant in VARIANTS
            for seed in seeds
        ]
    found = run_tasks(tasks, processes=options.processes)
    console = Console(width=200)
    for scenario, names in columns.items():
        table = Table(title=f"{scenario}: SLO attainment, % (pool changes per run)")
        table.add_column("")
        for column in names:
            table.add_column(column)
        for variant in VARIANTS:
            cells = [[found[f"{scenario}/{column}/{variant}/{seed}"] for seed in seeds] for column in names]
            table.add_row(variant, *map(_describe, cells))
        console.print(table)


def _describe(outcomes: Sequence[Outcome]) -> str:
    text = f"{_cell([o.attained for o in outcomes])} ({np.mean([o.flips for o in outcomes]):.0f})"
    after = [o.attained_after for o in outcomes if o.attained_after is not None]
    return f"{text}, after {100 * float(np.mean(after)):.1f}" if after else text


if __name__ == "__main__":
    main()
