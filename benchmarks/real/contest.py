"""One run: a policy, a seeded load, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.real.chat import Timing
from benchmarks.real.check import References
from benchmarks.real.figures import Figures, by_qoe, figures
from benchmarks.real.fleet import Fleet
from benchmarks.real.load import Arrival, offer
from benchmarks.real.plan import progress
from benchmarks.real.watch import watching
from tailrace.cluster import Pool
from tailrace.tiny.task import Task
from tailrace.v1 import types_pb2


@dataclass(frozen=True, slots=True)
class Layout:
    """Pools and stages that a run begins with."""

    pools: Mapping[str, Pool]
    stages: Sequence[types_pb2.Stage]


PLAIN = Layout({}, ())


@dataclass(frozen=True, slots=True)
class Arm:
    """A contestant: the fleet's policy with its parameters."""

    name: str
    policy: str
    parameters: Mapping[str, str] = field(default_factory=dict)


async def contest(
    fleet: Fleet,
    arm: Arm,
    seed: int,
    arrivals: Sequence[Arrival],
    references: References,
    layout: Layout = PLAIN,
    attains: Callable[[Timing], bool] = by_qoe,
) -> Figures:
    """Run the load under the policy, from an idle fleet to an idle fleet."""
    await fleet.clear()
    await fleet.set_stages(layout.stages)
    await fleet.set_pools(layout.pools)
    await fleet.set_policy(arm.policy, arm.parameters)
    began_s = time.perf_counter()
    async with watching(fleet) as watched:
        outcomes = await offer(fleet, arrivals, references)
        seconds = time.perf_counter() - began_s
    found = figures(arm.name, seed, outcomes, watched, seconds, attains)
    progress(
        f"  {arm.name}, seed {seed}: {found.equal} of {found.requests} answers equal, "
        f"SLO by {found.attained}, KV {found.kv_share_mean:.0%} on average, "
        f"{found.preemptions} preemptions, {seconds:.0f} s"
    )
    return found


def rate_for(load: float, references: References, tasks: Sequence[Task]) -> float:
    """Requests a second that bring `load` times the tokens that the fleet made with two streams a worker."""
    mean = sum(each.completion_tokens for each in tasks) / len(tasks)
    return load * references.tokens_per_s / mean
