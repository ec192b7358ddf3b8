"""Measure the scheduler's CPU use: idle and while placing, by number of workers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from experiments.live.simulated.figures import Counts
from experiments.live.simulated.fleet import LiveFleet
from experiments.live.simulated.outcome import Placements
from experiments.live.simulated.replay import replay
from experiments.live.simulated.shape import FleetShape
from experiments.live.simulated.simulation import has_pools
from simulator.workloads.arrivals import poisson_requests
from simulator.workloads.lengths import Lengths
from tests.harness.usage import cpu_seconds

# Small requests at a rate that two cores can handle: only the scheduler is measured.
_PROMPT_TOKENS: Final = 200
_OUTPUT_TOKENS: Final = 24


@dataclass(frozen=True, slots=True)
class SchedulerCost:
    """Cost under one policy. CPU time includes reports, events and ticks."""

    policy: str
    workers: int
    rate_per_s: float
    placements: int
    latency: Placements
    # CPU time of the scheduler's process: per 1,000 placements under load, and per second when idle.
    cpu_s_per_1000: float
    idle_cpu_s_per_s: float
    # Mean seconds of a tick's decision under load; NaN: the policy has no ticks.
    tick_s: float
    lost: int
    kept_up: bool


def cost_shape(workers: int) -> FleetShape:
    """Return fast engines with ample KV."""
    return FleetShape(
        workers=workers,
        profile="llama-3.1-8b-h100",
        speed=0.25,
        seats=64,
        kv_blocks=4096,
        max_tokens=_OUTPUT_TOKENS,
        reasons=False,
        prefill_instances=workers // 4,
    )


async def scheduler_cost(
    fleet: LiveFleet,
    policy: str,
    rate_per_s: float,
    seconds: float,
    idle_s: float,
    seed: int,
    on_progress: Callable[[int], None],
) -> SchedulerCost:
    """Measure the cost on a fleet of `cost_shape`."""
    await fleet.reset(policy, has_pools(policy))
    await fleet.wait_idle()
    pids = fleet.pids["scheduler"]
    began_s, before = time.monotonic(), cpu_seconds(pids)
    # This waits for no condition: it is the measured period.
    await asyncio.sleep(idle_s)
    idle = (cpu_seconds(pids) - before) / (time.monotonic() - began_s)

    count = round(rate_per_s * seconds)
    requests = poisson_requests("cost", _lengths, count, rate_per_s, seed)
    counts = Counts.of(await fleet.scrape("scheduler"))
    before = cpu_seconds(pids)
    run = await replay(fleet, policy, requests, on_progress)
    used = cpu_seconds(pids) - before
    counts = Counts.of(await fleet.scrape("scheduler")).since(counts)
    ticks = "tailrace_scheduler_decision_seconds"
    tick_count = counts.total(f"{ticks}_count", point="tick")
    return SchedulerCost(
        policy=policy,
        workers=fleet.shape.workers,
        rate_per_s=rate_per_s,
        placements=count,
        latency=run.placements,
        cpu_s_per_1000=used / count * 1e3,
        idle_cpu_s_per_s=idle,
        tick_s=counts.total(f"{ticks}_sum", point="tick") / tick_count if tick_count else float("nan"),
        lost=run.lost,
        kept_up=run.machine.kept_up,
    )


def _lengths(count: int, _: np.random.Generator) -> Lengths:
    """Return equal lengths."""
    return Lengths(*(np.full(count, each, np.int64) for each in (_PROMPT_TOKENS, 0, _OUTPUT_TOKENS)))
