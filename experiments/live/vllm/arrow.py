"""Compare Arrow with the same pools left static, under bursts: attainment, flips seen in etcd, pauses."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from experiments.live.vllm.capacity import full_kv_rate
from experiments.live.vllm.chat import Timing
from experiments.live.vllm.check import References
from experiments.live.vllm.contest import PLAIN, Arm, Layout, run_arm
from experiments.live.vllm.figures import Figures
from experiments.live.vllm.load import Arrival, poisson
from experiments.live.vllm.plan import Bench, alternate_order
from experiments.live.vllm.prompts import answers, conversations, max_completion_tokens, prompt_tokens
from experiments.live.vllm.report import Comparison
from tailrace.cluster import Pool
from tailrace.tiny.task import Task
from tests.harness.vllm_fleet import BLOCK_TOKENS, WORKERS, Engines, Fleet

# The SLOs that the policy plans for when it is set by name.
_TTFT_SLO_S: Final = 2.0
_TPOT_SLO_S: Final = 0.15
_ARMS: Final = (Arm("static", "static_pools"), Arm("arrow", "arrow"))
# With little KV: the paper's algorithm, and our variants.
_ANSWER_ARMS: Final = (
    Arm("least loaded, no pools", "least_loaded"),
    Arm("static", "static_pools"),
    Arm("arrow, room filter", "arrow", {"room": "filter"}),
    Arm("arrow, KV wait", "arrow", {"kv_wait": "true"}),
    Arm("arrow, KV wait, flips by attainment", "arrow", {"kv_wait": "true", "flips": "attainment"}),
    Arm("arrow", "arrow"),
)
# Requests of mean length that fit into the KV of one instance.
_KV_REQUESTS: Final = (2, 8, 32)

# Answers: relative to the fleet's rate with full KV; in the burst twice that.
_QUIET: Final = 0.3
_BURST: Final = 2.0
# Prompts: relative to the prefill rate of one instance with its own core; here three and the services share
# two.
_QUIET_PROMPTS: Final = 0.1
_BURST_PROMPTS: Final = 0.8
# Few tokens per step, so that prefill is the bottleneck, as on a GPU with long prompts; KV for a dozen of
# them.
_SMALL_STEPS: Final = Engines(kv_blocks=256, step_tokens=32)
# So many that a prompt has left the prefix cache of 8,000 tokens when it is sent again.
_CONVERSATIONS: Final = 240
# The tiny model is unsure of some and may answer wrongly; these are left out.
_MAX_WRONG_SHARE: Final = 0.05


@dataclass(frozen=True, slots=True)
class _Burst:
    """Requests per second before and after the burst, and within it, drawn from these tasks."""

    quiet: float
    burst: float
    tasks: Sequence[Task]

    def arrivals(self, seconds: float, seed: int) -> list[Arrival]:
        """Return arrivals, a third of the time for each rate; no task repeats before all were used."""
        third = seconds / 3
        shuffled = itertools.cycle(random.Random(seed).sample(self.tasks, len(self.tasks)))
        return [
            Arrival(part * third + arrival.at_s, next(shuffled))
            for part, rate in enumerate((self.quiet, self.burst, self.quiet))
            for arrival in poisson(self.tasks, rate, third, 10 * seed + part)
        ]


def meets_arrow_slos(timing: Timing) -> bool:
    """Return whether Arrow's SLOs (section 7.1) are met, counting the first token of any kind."""
    return timing.first_token_s <= _TTFT_SLO_S and timing.tpot_s <= _TPOT_SLO_S


async def run_answers(bench: Bench) -> Sequence[Comparison]:
    """Run the comparison with too few decode instances: Arrow's default share prefills, half, rounded up.

    KV per instance is for 2, 8 and 32 requests; each without a profile of the engine and with one.
    """
    tasks = answers(0)
    max_len = max(prompt_tokens(each) for each in tasks) + max_completion_tokens(tasks)
    found: list[Comparison] = []
    for requests in _KV_REQUESTS[: len(bench.scale.loads)]:
        blocks = 1 + requests * -(-max_len // BLOCK_TOKENS)
        engines = Engines(kv_blocks=blocks, max_len=max_len)
        fleet = await bench.fleet(engines)
        # Separate references: with other KV it is another fleet.
        references = References()
        await references.record_answers(fleet, tasks)
        unit = await full_kv_rate(fleet, tasks, blocks)
        burst = _Burst(_QUIET * unit, _BURST * unit, tasks)
        for profiled in (False, True):
            if profiled:
                await fleet.profile()
            name = f"arrow-kv{requests}" + ("-profiled" if profiled else "")
            workload = f"answers, KV for {requests}" + (", profiled" if profiled else "")
            arms = _ANSWER_ARMS if profiled else _ARMS
            found.append(
                await _compare(bench, fleet, references, name, workload, -(-WORKERS // 2), burst, arms)
            )
    return found


async def run_prompts(bench: Bench) -> Sequence[Comparison]:
    """Run the comparison with too few prefill instances: one, whose speed the policy knows from `tailrace
    profile`."""
    fleet = await bench.fleet(_SMALL_STEPS)
    ttft = (await fleet.profile()).ttft
    # Separate references: their token rate differs from that of the others.
    references = References()
    tasks = await references.record_answers(fleet, conversations(0, _CONVERSATIONS), _MAX_WRONG_SHARE)
    mean = sum(map(prompt_tokens, tasks)) / len(tasks)
    alone = 1.0 / (ttft.base_s + ttft.s_per_token * mean + ttft.s_per_token_squared * mean**2)
    burst = _Burst(_QUIET_PROMPTS * alone, _BURST_PROMPTS * alone, tasks)
    workload = f"prompts of {mean:.0f} tokens"
    return [await _compare(bench, fleet, references, "arrow-prompts", workload, 1, burst, _ARMS)]


async def _compare(
    bench: Bench,
    fleet: Fleet,
    references: References,
    name: str,
    workload: str,
    prefill: int,
    burst: _Burst,
    arms: Sequence[Arm],
) -> Comparison:
    names = sorted(fleet.members.instances)
    pools = {name: Pool.PREFILL if n < prefill else Pool.DECODE for n, name in enumerate(names)}
    runs: list[Figures] = []
    for number, seed in enumerate(bench.scale.seeds):
        arrivals = burst.arrivals(bench.scale.seconds, seed)
        for arm in alternate_order(arms, number):
            layout = PLAIN if arm.policy == "least_loaded" else Layout(pools, ())
            runs.append(await run_arm(fleet, arm, seed, arrivals, references, layout, meets_arrow_slos))
    return Comparison(
        name=name,
        title=f"Arrow against static pools ({prefill} prefill, {WORKERS - prefill} decode), "
        f"burst of {workload}",
        ours="arrow",
        rate=burst.burst,
        slo=f"first token within {_TTFT_SLO_S:g} s, then at most {_TPOT_SLO_S * 1e3:.0f} ms a token",
        compared=(
            "first_p50_s",
            "first_p90_s",
            "ttft_p90_s",
            "attained",
            "flips",
            "flip_stall_s",
            "longest_gap_s",
            "pause_ms_max",
        ),
        runs=runs,
    )
