"""Arrow against the same pools left static, on bursts: attainment, flips seen in etcd, no stream paused."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.real.chat import Timing
from benchmarks.real.check import References
from benchmarks.real.contest import Layout, contest, rate_for
from benchmarks.real.figures import Figures
from benchmarks.real.fleet import WORKERS, Engines, Fleet
from benchmarks.real.load import Arrival, poisson
from benchmarks.real.plan import PRESSED, Bench, mirrored
from benchmarks.real.prompts import answers, conversations, prompt_tokens
from benchmarks.real.report import Comparison
from tailrace.cluster import Pool
from tailrace.tiny.task import Task

# What the policy itself goes by, here and wherever it is set by name.
_TTFT_SLO_S: Final = 2.0
_TPOT_SLO_S: Final = 0.15
_CONTESTANTS: Final = ("static", "arrow")
_POLICIES: Final = {"static": "minimal_load", "arrow": "arrow"}

# Answers: times what the fleet makes with two streams a worker, in the burst six times as much as around it.
_QUIET: Final = 1.0
_BURST: Final = 6.0
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


async def run_answers(bench: Bench) -> Comparison:
    """Too little decodes: as many prefill instances as Arrow's default share gives, half, rounded up."""
    fleet = await bench.fleet(PRESSED)
    tasks = answers(0)
    await bench.references.learn(fleet, tasks)
    quiet, burst = (rate_for(load, bench.references, tasks) for load in (_QUIET, _BURST))
    found = _Burst(quiet, burst, tasks)
    return await _compare(bench, fleet, bench.references, "arrow", "answers", -(-WORKERS // 2), found)


async def run_prompts(bench: Bench) -> Comparison:
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
    return await _compare(bench, fleet, references, "arrow-prompts", of, 1, burst)


async def _compare(
    bench: Bench, fleet: Fleet, references: References, name: str, of: str, prefill: int, burst: _Burst
) -> Comparison:
    names = sorted(fleet.members.instances)
    pools = {name: Pool.PREFILL if n < prefill else Pool.DECODE for n, name in enumerate(names)}
    runs: list[Figures] = []
    for number, seed in enumerate(bench.scale.seeds):
        arrivals = burst.arrivals(bench.scale.seconds, seed)
        for contestant in mirrored(_CONTESTANTS, number):
            policy, layout = _POLICIES[contestant], Layout(pools, ())
            found = await contest(fleet, contestant, policy, seed, arrivals, references, layout, attains)
            runs.append(found)
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
