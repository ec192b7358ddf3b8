"""Two published ideas against `tailrace` and `least_loaded+earliest_due`, on two of the comparison's grounds.

Rates are 85% of what the best policy sustains. A seed is another section of the
trace; differences are paired by seed. The first fifth of the arrivals and the last twentieth are not counted.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from experiments.contestants.measure import FIGURES, measured
from experiments.policies.grounds import Case
from simulator.estimate import estimate
from simulator.parallel import Task, run_tasks
from tests.harness.report import save

RIVALS: Final = ("tailrace", "least_loaded+earliest_due")
_VELOCITY: Final = "experiments.contestants.token_velocity:TokenVelocity"
_CHUNKS: Final = "experiments.contestants.chunk_sizes:ChunkSizes"
CONTESTANTS: Final = (*RIVALS, _VELOCITY, f"{_VELOCITY}+earliest_due", _CHUNKS, f"{_CHUNKS}+earliest_due")
# Requests per second.
RATES: Final[Mapping[str, float]] = {"code": 64.0, "conversation": 128.0}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m experiments.contestants", description=__doc__)
    parser.add_argument("--traces", type=Path, required=True, help="folder of the public traces")
    parser.add_argument("--grounds", nargs="+", choices=sorted(RATES), default=sorted(RATES))
    parser.add_argument("--seconds", type=float, default=60.0, help="of arrivals")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--processes", type=int)
    options = parser.parse_args()
    seeds = range(options.seeds)
    cases = {
        (ground, policy, seed): Case(ground, policy, RATES[ground], seed)
        for ground in options.grounds
        for policy in CONTESTANTS
        for seed in seeds
    }
    arguments = (options.traces, options.seconds, options.seeds)
    found = run_tasks(
        [Task(case.name, measured, (case, *arguments)) for case in cases.values()],
        processes=options.processes,
    )
    table = Table()
    for heading in (
        "ground",
        "policy",
        "in SLO",
        f"less {RIVALS[0]}",
        f"less {RIVALS[1]}",
        "P99 TTFT",
        "TPOT",
    ):
        table.add_column(heading)
    figures: dict[str, object] = {}
    for ground in options.grounds:
        of = {policy: [found[cases[ground, policy, seed].name] for seed in seeds] for policy in CONTESTANTS}
        for policy, runs in of.items():
            attained = [run["attainment"] for run in runs]
            less = [
                estimate(
                    [100 * (a - rival["attainment"]) for a, rival in zip(attained, of[name], strict=True)]
                )
                for name in RIVALS
            ]
            ttft, tpot = (estimate([run[name] for run in runs]) for name in FIGURES[1:])
            table.add_row(
                ground,
                policy.rpartition(":")[2],
                _cell([100 * value for value in attained], 1),
                *(
                    "" if policy == rival else f"{each.mean:+.1f} ± {each.half_width or 0.0:.1f}"
                    for rival, each in zip(RIVALS, less, strict=True)
                ),
                f"{ttft.mean:.2f} s",
                f"{1e3 * tpot.mean:.0f} ms",
            )
            figures[f"{ground}, {policy}"] = [dict(run) for run in runs]
    console = Console(width=140)
    console.print(table)
    console.print(f"figures: {save('contestants', figures)}")


def _cell(values: list[float], decimals: int) -> str:
    found = estimate(values)
    return f"{found.mean:.{decimals}f} ± {found.half_width or 0.0:.{decimals}f}"


if __name__ == "__main__":
    main()
