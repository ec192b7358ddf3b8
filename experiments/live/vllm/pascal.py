"""Compare PASCAL with FCFS and RR by load: tail TTFT and SLO attainment (its figures 10 and 11)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from experiments.live.vllm.capacity import full_kv_rate
from experiments.live.vllm.contest import Arm, run_arm
from experiments.live.vllm.figures import BINS, QOE_SLO, Figures
from experiments.live.vllm.load import TPOT_S, poisson
from experiments.live.vllm.plan import SCARCE_KV, Bench
from experiments.live.vllm.prompts import mix
from experiments.live.vllm.report import Comparison
from tests.harness.vllm_fleet import Engines

# Seconds between reports: the default is 0.5 s, in which answers accumulate on full instances.
_FAST_REPORTS_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class _Entry:
    engines: Engines
    arm: Arm


# Order within instances, and policy: the paper's baselines place by smallest KV footprint (section V-A).
# Entries with the same fleet are adjacent; the last fleet is reused by all other comparisons.
_ENTRIES: Final = (
    _Entry(Engines(intra="fcfs"), Arm("fcfs", "least_loaded", {"load": "footprint"})),
    _Entry(Engines(intra="round_robin"), Arm("rr", "least_loaded", {"load": "footprint"})),
    _Entry(Engines(report_s=_FAST_REPORTS_S), Arm("pascal, reports each 0.1 s", "pascal")),
    _Entry(SCARCE_KV, Arm("pascal, no migration", "pascal", {"migration": "never"})),
    _Entry(SCARCE_KV, Arm("pascal, passing over", "pascal", {"pass_over": "1"})),
    _Entry(SCARCE_KV, Arm("pascal", "pascal")),
)


async def run(bench: Bench) -> Sequence[Comparison]:
    """Run the comparison at each load of the scale; 1.0 is the fleet's rate under FCFS with full KV."""
    tasks = mix(0)
    unit = 0.0
    runs: dict[float, list[Figures]] = {load: [] for load in bench.scale.loads}
    for entry in _ENTRIES:
        fleet = await bench.fleet(entry.engines)
        await bench.references.record_answers(fleet, tasks)
        # Measured once for all entries.
        unit = unit or await full_kv_rate(fleet, tasks, entry.engines.kv_blocks)
        for load in bench.scale.loads:
            for seed in bench.scale.seeds:
                arrivals = poisson(tasks, load * unit, bench.scale.seconds, seed)
                runs[load].append(await run_arm(fleet, entry.arm, seed, arrivals, bench.references))
    bins = tuple(f"ttft_by_reasoning:{name}" for name in _bins())
    return [
        Comparison(
            name=f"pascal-{load:g}",
            title=f"PASCAL against FCFS and RR at {load:g} of the fleet with its KV full",
            ours="pascal",
            rate=load * unit,
            slo=f"QoE of the answer at least {QOE_SLO} at {TPOT_S * 1e3:.0f} ms a token",
            compared=("ttft_p50_s", "ttft_p90_s", *bins, "attained"),
            runs=found,
        )
        for load, found in runs.items()
    ]


def _bins() -> tuple[str, ...]:
    return (f"0-{BINS[0] - 1}", f"{BINS[0]}-{BINS[1] - 1}", f"{BINS[1]}+")
