"""Switch the policy every five seconds among all policies under load, checking every answer."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from typing import Final

from experiments.live.vllm.contest import rate_for
from experiments.live.vllm.figures import Figures, figures
from experiments.live.vllm.load import poisson, run_load
from experiments.live.vllm.observe import observing
from experiments.live.vllm.plan import Bench, progress
from experiments.live.vllm.prompts import mix
from experiments.live.vllm.report import Comparison
from tailrace.policy.registry import names
from tests.harness.vllm_fleet import Fleet

_PERIOD_S: Final = 5.0
_LOAD: Final = 2.0
_SEED: Final = 7


async def run(bench: Bench) -> Sequence[Comparison]:
    """Cycle through all installed policies, in an order drawn from the seed, while requests arrive."""
    fleet = await bench.fleet()
    tasks = mix(0)
    await bench.references.record_answers(fleet, tasks)
    await fleet.clear()
    order = names()
    random.Random(_SEED).shuffle(order)
    rate = rate_for(_LOAD, bench.references, tasks)
    arrivals = poisson(tasks, rate, bench.scale.switch_s, _SEED)
    began_s = time.perf_counter()
    async with observing(fleet) as observed:
        switcher = asyncio.create_task(_switch_policies(fleet, order), name="switching")
        try:
            outcomes = await run_load(fleet, arrivals, bench.references)
        finally:
            switcher.cancel()
            done = await asyncio.gather(switcher, return_exceptions=True)
        if isinstance(done[0], Exception):
            raise done[0]
        seconds = time.perf_counter() - began_s
    await fleet.clear()
    runs: list[Figures] = [figures("all in turn", _SEED, outcomes, observed, seconds)]
    switches = int(seconds / _PERIOD_S)
    policies = {record.policy for record in observed.migrations}
    runs[0].more = {"switches": switches, "policies": min(switches, len(order)), "moved_by": len(policies)}
    found = Comparison(
        name="switch",
        title=f"Policy switched every {_PERIOD_S:g} s among all {len(order)}",
        ours="all in turn",
        rate=rate,
        slo="none",
        compared=("moved", "flips", "preemptions", "longest_gap_s"),
        runs=runs,
    )
    return [found]


async def _switch_policies(fleet: Fleet, order: list[str]) -> None:
    """Switch policies until cancelled."""
    number = 0
    while True:
        name = order[number % len(order)]
        await fleet.set_policy(name)
        progress(f"  policy {name}")
        number += 1
        await asyncio.sleep(_PERIOD_S)
