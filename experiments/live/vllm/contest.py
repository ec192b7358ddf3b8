"""Run one policy under one seeded load."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from experiments.live.vllm.chat import Timing
from experiments.live.vllm.check import References
from experiments.live.vllm.figures import Figures, figures, meets_qoe_slo
from experiments.live.vllm.load import Arrival, run_load
from experiments.live.vllm.observe import observing
from experiments.live.vllm.plan import progress
from tailrace.cluster import Pool
from tailrace.tiny.task import Task
from tailrace.v1 import types_pb2
from tests.harness.vllm_fleet import Fleet


@dataclass(frozen=True, slots=True)
class Layout:
    """Initial pools and stages of a run."""

    pools: Mapping[str, Pool]
    stages: Sequence[types_pb2.Stage]


PLAIN = Layout({}, ())


@dataclass(frozen=True, slots=True)
class Arm:
    """A contestant: a policy with its parameters."""

    name: str
    policy: str
    parameters: Mapping[str, str] = field(default_factory=dict)


async def run_arm(
    fleet: Fleet,
    arm: Arm,
    seed: int,
    arrivals: Sequence[Arrival],
    references: References,
    layout: Layout = PLAIN,
    meets_slo: Callable[[Timing], bool] = meets_qoe_slo,
) -> Figures:
    """Run the load under the policy; the fleet is idle before and after."""
    await fleet.clear()
    await fleet.set_stages(layout.stages)
    await fleet.set_pools(layout.pools)
    await fleet.set_policy(arm.policy, arm.parameters)
    began_s = time.perf_counter()
    async with observing(fleet) as observed:
        outcomes = await run_load(fleet, arrivals, references)
        seconds = time.perf_counter() - began_s
    found = figures(arm.name, seed, outcomes, observed, seconds, meets_slo)
    progress(
        f"  {arm.name}, seed {seed}: {found.equal} of {found.requests} answers equal, "
        f"SLO met by {found.attained}, mean KV use {found.kv_share_mean:.0%}, "
        f"{found.preemptions} preemptions, {seconds:.0f} s"
    )
    return found


def rate_for(load: float, references: References, tasks: Sequence[Task]) -> float:
    """Return the requests per second for `load` times the undisturbed token rate."""
    mean = sum(each.completion_tokens for each in tasks) / len(tasks)
    return load * references.tokens_per_s / mean
