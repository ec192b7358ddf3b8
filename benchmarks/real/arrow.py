"""Arrow against the same pools left static, on bursts: attainment, flips seen in etcd, no stream paused."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.real.capacity import full_kv_rate
from benchmarks.real.chat import Timing
from benchmarks.real.check import References
from benchmarks.real.contest import PLAIN, Arm, Layout, contest
from benchmarks.real.figures import Figures
from benchmarks.real.fleet import BLOCK_TOKENS, WORKERS, Engines, Fleet
from benchmarks.real.load import Arrival, poisson
from benchmarks.real.plan import Bench, mirrored
from benchmarks.real.prompts import answers, conversations, longest, prompt_tokens
from benchmarks.real.report import Comparison
from tailrace.cluster import Pool
from tailrace.tiny.task import Task

# What the policy itself goes by, here and wherever it is set by name.
_TTFT_SLO_S: Final = 2.0
_TPOT_SLO_S: Final = 0.15
_ARMS: Final = (Arm("static", "minimal_load"), Arm("arrow", "arrow"))
# What becomes of it where KV is short: the paper's letter, and our variants beside it.
_ANSWER_ARMS: Final = (
    Arm("least loaded, no pools", "least_loaded"),
    Arm("static", "minimal_load"),
    Arm("arrow, room filter", "arrow", {"room": "filter"}),
    Arm("arrow, KV wait", "arrow", {"kv_wait": "true"}),
    Arm("arrow, KV wait, flips by attainment", "arrow", {"kv_wait": "true", "flips": "attainment"}),
    Arm("arrow", "arrow"),
)
# Requests of the mean length that the KV of one instance holds.
_KV_REQUESTS: Final = (2, 8, 32)

# Answers: of what the fleet completes with its KV full; in the burst twice that.
_QUIET: Final = 0.3
_BURST: Final = 2.0
# Prompts: times what one instance prefills that has a core to itself; here three and the services share two.
_QUIET_PROMPTS: Final = 0.1
_BURST_PROMPTS: Final = 0.8
# So few tokens a step that prefill is what is scarce, as on a GPU with long prompts; KV for a dozen of them.
_SMALL_STEPS: Final = Engines(kv_blocks=256, step_tokens=32)
# So many that a prompt has left the prefix cache, of 8,000 tokens, when it is asked again.
_CONVERSATIONS: Final = 240
# Some are beyond the tiny model, and left out: a wrong answer is one that it is not sure of.
_MOST_WRONG: Final = 0.05


@dataclass(frozen=True, slots=True)
class _Burst:
    """Requests a second before and after, and within; from these tasks."""

    quiet: float
    burst: float
    tasks: Sequence[Task]

    def arrivals(self, seconds: float, seed: int) -> list[Arrival]:
        """A third of the time each; no task again before each was asked."""
        third = seconds / 3
        asked = itertools.cycle(random.Random(seed).sample(self.tasks, len(self.tasks)))
        return [
            Arrival(part * third + arrival.at_s, next(asked))
            for part, rate in enumerate((self.quiet, self.burst, self.quiet))
            for arrival in poisson(self.tasks, rate, third, 10 * seed + part)
        ]


def attains(timing: Timing) -> bool:
    """Arrow's SLOs (section 7.1), of the first token of any kind."""
    return timing.first_token_s <= _TTFT_SLO_S and timing.tpot_s <= _TPOT_SLO_S


async def run_answers(bench: Bench) -> Sequence[Comparison]:
    """Too little decodes: as many prefill instances as Arrow's default share gives, half, rounded up.

    With KV for 2, 8 and 32 requests an instance; each without a profile of the engine and with one.
    """
    tasks = answers(0)
    most = max(prompt_tokens(each) for each in tasks) + longest(tasks)
    found: list[Comparison] = []
    for requests in _KV_REQUESTS[: len(bench.scale.loads)]:
        blocks = 1 + requests * -(-most // BLOCK_TOKENS)
        engines = Engines(kv_blocks=blocks, max_len=most)
        fleet = await bench.fleet(engines)
        # Of their own: a fleet with more KV is another fleet.
        references = References()
        await references.learn(fleet, tasks)
        unit = await full_kv_rate(fleet, tasks, blocks)
        burst = _Burst(_QUIET * unit, _BURST * unit, tasks)
        for profiled in (False, True):
            if profiled:
                await fleet.profile()
            name = f"arrow-kv{requests}" + ("-profiled" if profiled else "")
            of = f"answers, KV for {requests}" + (", profiled" if profiled else "")
            arms = _ANSWER_ARMS if profiled else _ARMS
            found.append(await _compare(bench, fleet, references, name, of, -(-WORKERS // 2), burst, arms))
    return found


async def run_prompts(bench: Bench) -> Sequence[Comparison]:
    """Too little prefills: one instance, and by `tailrace profile` the policy knows how fast it is."""
    fleet = await bench.fleet(_SMALL_STEPS)
    ttft = (await fleet.profile()).ttft
    # Of their own: how fast these come is not how fast the others do.
    references = References()
    tasks = await references.learn(fleet, conversations(0, _CONVERSATIONS), _MOST_WRONG)
    mean = sum(map(prompt_tokens, tasks)) / len(tasks)
    alone = 1.0 / (ttft.base_s + ttft.s_per_token * mean + ttft.s_per_token_squared * mean**2)
    burst = _Burst(_QUIET_PROMPTS * alone, _BURST_PROMPTS * alone, tasks)
    of = f"prompts of {mean:.0f} tokens"
    return [await _compare(bench, fleet, references, "arrow-prompts", of, 1, burst, _ARMS)]


async def _compare(
    bench: Bench,
    fleet: Fleet,
    references: References,
    name: str,
    of: str,
    prefill: int,
    burst: _Burst,
    arms: Sequence[Arm],
) -> Comparison:
    names = sorted(fleet.members.instances)
    pools = {name: Pool.PREFILL if n < prefill else Pool.DECODE for n, name in enumerate(names)}
    runs: list[Figures] = []
    for number, seed in enumerate(bench.scale.seeds):
        arrivals = burst.arrivals(bench.scale.seconds, seed)
        for arm in mirrored(arms, number):
            layout = PLAIN if arm.policy == "least_loaded" else Layout(pools, ())
            runs.append(await contest(fleet, arm, seed, arrivals, references, layout, attains))
    return Comparison(
        name=name,
        title=f"Arrow against static pools ({prefill} prefill, {WORKERS - prefill} decode), burst of {of}",
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
