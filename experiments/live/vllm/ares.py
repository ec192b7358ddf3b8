"""Compare ARES with the same dispatch without rescheduling: variance of KV use, preemptions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from experiments.live.vllm.contest import Arm, rate_for, run_arm
from experiments.live.vllm.figures import QOE_SLO, Figures
from experiments.live.vllm.load import TPOT_S, poisson
from experiments.live.vllm.plan import Bench, alternate_order
from experiments.live.vllm.prompts import skewed
from experiments.live.vllm.report import Comparison

_LOAD: Final = 3.5
# The paper's "vLLM" dispatches by current load; workers predict lengths with the shipped predictor.
_ARMS: Final = (Arm("no rescheduling", "ares", {"rescheduling": "off"}), Arm("ares", "ares"))


async def run(bench: Bench) -> Sequence[Comparison]:
    """Run the comparison with lengths that differ by a factor of ten and are unknown at placement."""
    fleet = await bench.fleet()
    tasks = skewed(0)
    await bench.references.record_answers(fleet, tasks)
    rate = rate_for(_LOAD, bench.references, tasks)
    runs: list[Figures] = []
    for number, seed in enumerate(bench.scale.seeds):
        arrivals = poisson(tasks, rate, bench.scale.seconds, seed)
        runs += [
            await run_arm(fleet, arm, seed, arrivals, bench.references)
            for arm in alternate_order(_ARMS, number)
        ]
    found = Comparison(
        name="ares",
        title="ARES against no rescheduling",
        ours="ares",
        rate=rate,
        slo=f"QoE of the answer at least {QOE_SLO} at {TPOT_S * 1e3:.0f} ms a token",
        compared=("kv_variance_mean", "preemptions", "ttft_p90_s", "attained", "moved"),
        runs=runs,
    )
    return [found]
