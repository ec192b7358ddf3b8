"""`python -m benchmarks.simulation`: measure the simulator's speed, policy by policy.

One case is a real hour: the Azure LLM inference trace of 2023, conversations (19,366 requests), on 8
instances. The other is a large cluster: ARES's figure 12 at its largest, 256 instances, 0.3 requests per
second for every 8. Runs are sequential on one core. On a shared machine, use the CPU seconds.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from simulator.cluster import ClusterSpec, LinkSpec
from simulator.request import SimRequest
from simulator.setups import setup_for
from simulator.simulation import simulate
from simulator.workloads.arrivals import poisson_requests
from simulator.workloads.base import Clip
from simulator.workloads.generators import GENERATORS
from simulator.workloads.traces import load_azure
from tailrace.policy.deployment import Deployment
from tailrace.profiles import load_profile
from tests.harness.report import print_json, save, table_console

# Names the folder of the public data, which contains `traces/`.
DATA_VARIABLE: Final = "TAILRACE_DATA"
TRACE: Final = Path("traces/azure_llm_2023/AzureLLMInferenceTrace_conv.csv")

POLICIES: Final = (
    "round_robin",
    "least_loaded",
    "least_loaded load=footprint",
    "least_loaded+fcfs load=footprint",
    "least_loaded+round_robin load=footprint",
    "pascal",
    "ares rescheduling=off",
    "ares",
    "ares predict=oracle",
    "static_pools",
    "arrow",
    "tailrace.policy.cascade.llumnix:Llumnix",
    "cascade",
    "tailrace",
)
# Policies of figure 12.
LARGE_POLICIES: Final = ("ares rescheduling=off", "ares rescheduling=current_load", "ares predict=oracle")


@dataclass(frozen=True, slots=True)
class Case:
    """One simulation to time."""

    name: str
    policy: str
    cluster: ClusterSpec
    requests: Sequence[SimRequest]


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one simulation."""

    case: str
    policy: str
    instances: int
    requests: int
    output_tokens: int
    migrations: int
    simulated_s: float
    events: int
    wall_s: float
    cpu_s: float
    events_per_cpu_s: float


def hour(trace: Path, policies: Sequence[str], instances: int, limit: int | None) -> list[Case]:
    """Return the trace on this many instances, for each policy."""
    workload = load_azure(trace, Clip(count=limit))
    cluster = ClusterSpec.uniform(instances, load_profile("llama-3.1-8b-h800"))
    return [Case("azure conversation hour", policy, cluster, workload.requests) for policy in policies]


def figure_12(instances: int, seconds: float) -> list[Case]:
    """Return ARES's figure 12: requests with its table 2's ShareGPT lengths, over so many seconds, at 25
    Gbit/s."""
    rate = 0.3 * instances / 8
    count = max(1, round(rate * seconds))
    requests = poisson_requests("ares", GENERATORS["sharegpt_ares"].lengths, count, rate, 0)
    cluster = ClusterSpec.uniform(instances, load_profile("r1-distill-qwen-7b-w8a8-rtx4090d"))
    cluster = replace(cluster, link=LinkSpec(bytes_per_s=25e9 / 8))
    return [Case("ARES figure 12", policy, cluster, requests) for policy in LARGE_POLICIES]


def measure(case: Case) -> Cost:
    """Run a simulation once."""
    setup = setup_for(case.policy)
    profile = case.cluster.instances[0].profile
    policy, intra, cluster = (
        setup.policy(Deployment(profile=profile)),
        setup.intra(),
        setup.apply(case.cluster),
    )
    gc.collect()
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    result = simulate(cluster, case.requests, policy, intra)
    cpu_s = time.process_time() - began_cpu_s
    return Cost(
        case=case.name,
        policy=case.policy,
        instances=len(cluster.instances),
        requests=len(case.requests),
        output_tokens=sum(record.output_tokens for record in result.requests if record.finish_s is not None),
        migrations=sum(record.migrations for record in result.requests),
        simulated_s=result.end_s,
        events=result.events_processed,
        wall_s=time.perf_counter() - began_s,
        cpu_s=cpu_s,
        events_per_cpu_s=result.events_processed / cpu_s,
    )


def table(costs: Sequence[Cost]) -> Table:
    """Return a table with one row per simulation."""
    result = Table(title="Cost of simulations on one core")
    for heading in ("case", "policy"):
        result.add_column(heading, no_wrap=True)
    for heading in (
        "instances",
        "requests",
        "migrations",
        "CPU s",
        "wall s",
        "events/CPU s",
        "x real time",
    ):
        result.add_column(heading, justify="right")
    for cost in costs:
        result.add_row(
            cost.case,
            cost.policy,
            f"{cost.instances:,}",
            f"{cost.requests:,}",
            f"{cost.migrations:,}",
            f"{cost.cpu_s:.1f}",
            f"{cost.wall_s:.1f}",
            f"{cost.events_per_cpu_s:,.0f}",
            f"{cost.simulated_s / cost.cpu_s:,.0f}",
        )
    return result


def _cases(options: argparse.Namespace, parser: argparse.ArgumentParser) -> list[Case]:
    cases: list[Case] = []
    trace: Path | None = options.trace
    if trace is None and DATA_VARIABLE in os.environ:
        trace = Path(os.environ[DATA_VARIABLE]) / TRACE
    policies = options.policies.split(",") if options.policies else POLICIES
    if list(policies) != ["none"]:
        if trace is None or not trace.is_file():
            parser.error(
                f"missing trace: use --trace, or set {DATA_VARIABLE} to a folder that contains {TRACE}"
            )
        cases += hour(trace, policies, options.instances, options.limit)
    if options.large_instances:
        cases += figure_12(options.large_instances, options.large_seconds)
    return cases


def main(arguments: Sequence[str] | None = None) -> Path:
    """Run the benchmark; return the path of the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulation", description=__doc__)
    parser.add_argument("--trace", type=Path, help=f"CSV; default: {TRACE} in ${DATA_VARIABLE}")
    parser.add_argument("--policies", default="", help="comma-separated; none: only the large cluster")
    parser.add_argument("--instances", type=int, default=8)
    parser.add_argument("--limit", type=int, help="maximum requests of the trace")
    parser.add_argument("--large-instances", type=int, default=256, help="0: no large cluster")
    parser.add_argument("--large-seconds", type=float, default=2_000.0, help="duration of arrivals on it")
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    options = parser.parse_args(arguments)
    console = Console(stderr=True)
    cases = _cases(options, parser)
    costs: list[Cost] = []
    with Progress(console=console) as progress:
        task = progress.add_task("simulating", total=len(cases))
        for case in cases:
            progress.update(task, description=f"{case.policy} on {len(case.cluster.instances)}")
            costs.append(measure(case))
            progress.advance(task)
    figures: dict[str, object] = {"costs": [asdict(cost) for cost in costs]}
    path = save("simulation", figures)
    if options.output == "json":
        print_json("simulation", figures)
    else:
        table_console(140).print(table(costs))
    console.print(f"saved to {path}")
    return path


if __name__ == "__main__":
    main()
