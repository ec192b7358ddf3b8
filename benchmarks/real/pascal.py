"""PASCAL against FCFS and RR: tail TTFT by reasoning length, SLO attainment (its figures 10 and 11)."""

from __future__ import annotations

from typing import Final

from benchmarks.real.contest import contest, rate_for
from benchmarks.real.figures import BINS, QOE_SLO, Figures
from benchmarks.real.fleet import Engines
from benchmarks.real.load import TPOT_S, poisson
from benchmarks.real.plan import Bench
from benchmarks.real.prompts import mix
from benchmarks.real.report import Comparison

# Four times what the fleet does with two streams a worker: KV is full, and requests wait.
_LOAD: Final = 4.0
# Order inside the instances and policy: the paper's baselines place by smallest KV footprint (section V-A).
# PASCAL last: its fleet is the one that all other comparisons use.
_CONTESTANTS: Final = (
    ("fcfs", "fcfs", "min_kv"),
    ("rr", "round_robin", "min_kv"),
    ("pascal", "policy", "pascal"),
)


async def run(bench: Bench) -> Comparison:
    """One fleet a contestant, since FCFS and RR are orders that go with no policy by name."""
    tasks = mix(0)
    runs: list[Figures] = []
    rate = 0.0
    for name, intra, policy in _CONTESTANTS:
        fleet = await bench.fleet(Engines(intra=intra))
        await bench.references.learn(fleet, tasks)
        # Once for all of them.
        rate = rate or rate_for(_LOAD, bench.references, tasks)
        for seed in bench.scale.seeds:
            arrivals = poisson(tasks, rate, bench.scale.seconds, seed)
            runs.append(await contest(fleet, name, policy, seed, arrivals, bench.references))
    return Comparison(
        name="pascal",
        title="PASCAL against FCFS and RR",
        ours="pascal",
        rate=rate,
        slo=f"QoE of the answer at least {QOE_SLO} at {TPOT_S * 1e3:.0f} ms a token",
        compared=("ttft_p50_s", "ttft_p90_s", *(f"ttft_by_reasoning:{name}" for name in _bins()), "attained"),
        runs=runs,
    )


def _bins() -> tuple[str, ...]:
    return (f"0-{BINS[0] - 1}", f"{BINS[0]}-{BINS[1] - 1}", f"{BINS[1]}+")
