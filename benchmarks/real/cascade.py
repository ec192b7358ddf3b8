"""CascadeInfer's handovers: bid-ask between workers against whoever's turn it is."""

from __future__ import annotations

from typing import Final

from benchmarks.real.contest import Layout, contest, rate_for
from benchmarks.real.figures import QOE_SLO, Figures
from benchmarks.real.fleet import MAX_LEN
from benchmarks.real.load import TPOT_S, poisson
from benchmarks.real.plan import Bench, mirrored
from benchmarks.real.prompts import mix
from benchmarks.real.report import Comparison
from tailrace.v1 import types_pb2

_LOAD: Final = 3.0
# Below the long requests' reasoning, above nearly all of the short ones.
_BOUNDARY: Final = 400
_CONTESTANTS: Final = ("in turn", "bid-ask")
_POLICIES: Final = {"in turn": "cascade_round_robin", "bid-ask": "cascade"}


async def run(bench: Bench) -> Comparison:
    """One instance for short contexts, two for long ones: those two bid."""
    fleet = await bench.fleet()
    tasks = mix(0)
    await bench.references.learn(fleet, tasks)
    names = sorted(fleet.members.instances)
    # Two-sided room for lengths beyond what the model may have: stages must cover every length.
    stages = [
        types_pb2.Stage(lo=0, hi=_BOUNDARY, instance_ids=names[:1]),
        types_pb2.Stage(lo=_BOUNDARY, hi=max(131_072, MAX_LEN), instance_ids=names[1:]),
    ]
    rate = rate_for(_LOAD, bench.references, tasks)
    runs: list[Figures] = []
    for number, seed in enumerate(bench.scale.seeds):
        arrivals = poisson(tasks, rate, bench.scale.seconds, seed)
        for name in mirrored(_CONTESTANTS, number):
            layout = Layout({}, stages)
            runs.append(await contest(fleet, name, _POLICIES[name], seed, arrivals, bench.references, layout))
    return Comparison(
        name="cascade",
        title="CascadeInfer's handovers with bid-ask against in turn",
        ours="bid-ask",
        rate=rate,
        slo=f"QoE of the answer at least {QOE_SLO} at {TPOT_S * 1e3:.0f} ms a token",
        compared=("moved", "offers_taken", "offers_kept", "ttft_p90_s", "attained", "longest_gap_s"),
        runs=runs,
    )
