"""Compare CascadeInfer's stages and bids with schedulers that ignore lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from experiments.live.vllm.capacity import full_kv_rate
from experiments.live.vllm.contest import PLAIN, Arm, Layout, run_arm
from experiments.live.vllm.figures import QOE_SLO, Figures
from experiments.live.vllm.lengths import spread_over_equal
from experiments.live.vllm.load import TPOT_S, poisson
from experiments.live.vllm.plan import SCARCE_KV, Bench, alternate_order
from experiments.live.vllm.prompts import mix
from experiments.live.vllm.report import Comparison
from tailrace.v1 import types_pb2
from tests.harness.vllm_fleet import MAX_LEN, Engines

# Below the reasoning lengths of long requests, above those of nearly all short ones.
_BOUNDARY: Final = 400
_ALONE: Final = Engines(workers=1, kv_blocks=256)
# These run on the stages below; the others have no stages.
_STAGED: Final = ("no pipeline", "in turn", "bid-ask")
_ARMS: Final = (
    Arm("round robin", "round_robin"),
    Arm("no pipeline", "cascade", {"layout": "one_stage"}),
    Arm("in turn", "cascade", {"handover": "round_robin", "rebalance": "false"}),
    Arm("bid-ask", "cascade"),
)


async def run(bench: Bench) -> Sequence[Comparison]:
    """Run the comparison with one instance for short contexts and two for long ones, which bid.

    First measure the cost of unequal lengths on one engine: the upper bound of what sorting can gain.
    """
    cost = await spread_over_equal(await bench.fleet(_ALONE))
    fleet = await bench.fleet(SCARCE_KV)
    tasks = mix(0)
    await bench.references.record_answers(fleet, tasks)
    unit = await full_kv_rate(fleet, tasks, SCARCE_KV.kv_blocks)
    names = sorted(fleet.members.instances)
    # Stages must cover every length, also beyond what the model supports.
    stages = [
        types_pb2.Stage(lo=0, hi=_BOUNDARY, instance_ids=names[:1]),
        types_pb2.Stage(lo=_BOUNDARY, hi=max(131_072, MAX_LEN), instance_ids=names[1:]),
    ]
    found: list[Comparison] = []
    for load in bench.scale.loads[-2:]:
        runs: list[Figures] = []
        for number, seed in enumerate(bench.scale.seeds):
            arrivals = poisson(tasks, load * unit, bench.scale.seconds, seed)
            for arm in alternate_order(_ARMS, number):
                layout = Layout({}, stages) if arm.name in _STAGED else PLAIN
                runs.append(await run_arm(fleet, arm, seed, arrivals, bench.references, layout))
        runs[0].more = {"a step of unequal lengths over one of equal": cost}
        found.append(
            Comparison(
                name=f"cascade-{load:g}",
                title=f"CascadeInfer against others at {load:g} of the fleet with its KV full",
                ours="bid-ask",
                rate=load * unit,
                slo=f"QoE of the answer at least {QOE_SLO} at {TPOT_S * 1e3:.0f} ms a token",
                compared=("moved", "offers_taken", "offers_kept", "ttft_p90_s", "attained", "longest_gap_s"),
                runs=runs,
            )
        )
    return found
