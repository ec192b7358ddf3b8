"""Arrow against the same pools left static, on a burst: attainment, flips seen in etcd, no stream paused."""

from __future__ import annotations

from typing import Final

from benchmarks.real.chat import Timing
from benchmarks.real.contest import Layout, contest, rate_for
from benchmarks.real.figures import Figures
from benchmarks.real.fleet import WORKERS
from benchmarks.real.load import Arrival, poisson
from benchmarks.real.plan import Bench, mirrored
from benchmarks.real.prompts import answers
from benchmarks.real.report import Comparison
from tailrace.cluster import Pool

# A quiet beginning, then five times as much, then quiet again: a third of the time each.
_QUIET: Final = 1.0
_BURST: Final = 6.0
# What the policy itself goes by, here and wherever it is set by name.
_TTFT_SLO_S: Final = 2.0
_TPOT_SLO_S: Final = 0.15
_CONTESTANTS: Final = ("static", "arrow")
_POLICIES: Final = {"static": "minimal_load", "arrow": "arrow"}


def attains(timing: Timing) -> bool:
    """Arrow's SLOs (section 7.1), of the first token of any kind."""
    return timing.first_token_s <= _TTFT_SLO_S and timing.tpot_s <= _TPOT_SLO_S


async def run(bench: Bench) -> Comparison:
    """Both begin with as many prefill instances as Arrow's default share gives: half, rounded up."""
    fleet = await bench.fleet()
    tasks = answers(0)
    await bench.references.learn(fleet, tasks)
    prefill = -(-WORKERS // 2)
    names = sorted(fleet.members.instances)
    pools = {name: Pool.PREFILL if n < prefill else Pool.DECODE for n, name in enumerate(names)}
    quiet, burst = (rate_for(load, bench.references, tasks) for load in (_QUIET, _BURST))
    third = bench.scale.seconds / 3
    runs: list[Figures] = []
    for number, seed in enumerate(bench.scale.seeds):
        arrivals = [
            Arrival(part * third + arrival.at_s, arrival.asked)
            for part, rate in enumerate((quiet, burst, quiet))
            for arrival in poisson(tasks, rate, third, 10 * seed + part)
        ]
        for name in mirrored(_CONTESTANTS, number):
            policy, layout = _POLICIES[name], Layout(pools, ())
            found = await contest(fleet, name, policy, seed, arrivals, bench.references, layout, attains)
            runs.append(found)
    return Comparison(
        name="arrow",
        title=f"Arrow against static pools ({prefill} prefill, {WORKERS - prefill} decode) on a burst",
        ours="arrow",
        rate=burst,
        slo=f"first token within {_TTFT_SLO_S:g} s, then at most {_TPOT_SLO_S * 1e3:.0f} ms a token",
        compared=(
            "ttft_p50_s",
            "ttft_p90_s",
            "attained",
            "flips",
            "flip_stall_s",
            "longest_gap_s",
            "pause_ms_max",
        ),
        runs=runs,
    )
