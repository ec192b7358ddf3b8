"""CascadeInfer at the load that its paper reports and past it, on the paper's testbed.

Loads are relative to what the 16 instances would serve with full batches if unequal lengths cost nothing;
unequal lengths cost what figure 2 says. `overflow=true` is ours: see `Cascade.place`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from experiments.claims.base import Figures
from experiments.claims.cascade.cluster import FIGURE_2, FULL, LLUMNIX
from experiments.claims.cascade.operating import PASSING, VLLM
from experiments.claims.cascade.serving import serve
from experiments.claims.verdicts import number
from simulator.estimate import estimate
from simulator.parallel import Task, run_tasks
from tests.harness.report import save

LOADS = (0.7, 0.8, 0.9, 1.0)
SCHEDULERS = (VLLM, LLUMNIX, FULL, f"{FULL} overflow=true")
# Figure, heading, factor and decimals.
_COLUMNS = (
    ("tokens_per_s", "1,000 tokens/s", 1e-3, 1),
    ("kept_up", "of demand", 1.0, 2),
    ("ttft_mean_s", "mean TTFT s", 1.0, 2),
    ("tpot_mean_s", "mean TPOT ms", 1e3, 0),
    ("migrations", "migrations", 1.0, 0),
)


def _name(scheduler: str, load: float, seed: int) -> str:
    return f"{scheduler} at {load:g}, seed {seed}"


def table(
    found: Mapping[str, Figures], schedulers: Sequence[str], loads: Sequence[float], seeds: Sequence[int]
) -> Table:
    """Return means over the seeds with the half-widths of their 95% intervals."""
    result = Table()
    for heading in ("load", "scheduler", *(heading for _, heading, _, _ in _COLUMNS)):
        result.add_column(heading)
    for load in loads:
        for scheduler in schedulers:
            cells = []
            for figure, _, factor, decimals in _COLUMNS:
                values = [factor * number(found[_name(scheduler, load, seed)], figure) for seed in seeds]
                mean = estimate(values)
                spread = "" if mean.half_width is None else f" ± {mean.half_width:.{decimals}f}"
                cells.append(f"{mean.mean:.{decimals}f}{spread}")
            result.add_row(f"{load:g}", scheduler.rpartition(":")[2], *cells)
    return result


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loads", type=float, nargs="+", default=LOADS)
    parser.add_argument("--schedulers", nargs="+", default=SCHEDULERS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=PASSING.seconds, help="of arrivals")
    parser.add_argument("--processes", type=int)
    options = parser.parse_args()
    seeds = range(1, options.seeds + 1)
    console = Console(stderr=True)
    tasks = [
        Task(
            _name(scheduler, load, seed),
            serve,
            (scheduler, FIGURE_2, load, options.seconds, PASSING.warm_up, seed),
            load,
        )
        for load in options.loads
        for scheduler in options.schedulers
        for seed in seeds
    ]
    found = run_tasks(
        tasks,
        processes=options.processes,
        progress=lambda done: console.print(f"{done.done} of {done.total}: {done.name}"),
    )
    console.print(f"saved to {save('cascade-load', {name: dict(each) for name, each in found.items()})}")
    Console(width=140).print(table(found, options.schedulers, options.loads, seeds))


if __name__ == "__main__":
    main()
