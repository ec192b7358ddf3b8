"""All policies with the batch order `earliest_due`, and some with their own, on eight grounds.

Rates are shares of the highest one, found by bisection with another seed, at which `least_loaded` or
`tailrace` keeps the SLOs of 90% of the requests. Of each run the first fifth of the arrivals and the last
twentieth are not counted. A seed is other draws, or another section of a trace. Means over the seeds; a
policy is the best only if no other cannot be distinguished from it, paired by seed, at 95%.

Every finished run is added to the file of `--resume`, and is not repeated until code or traces change.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Final

from rich.console import Console

from experiments.claims.base import Figures, Run
from experiments.claims.kept import KeptFigures, code_version
from experiments.claims.verdicts import number
from experiments.policies.grounds import GROUNDS, Case
from experiments.policies.measure import capacity_per_s, measure
from experiments.policies.page import Found, grounds_of, plot, section, with_parts
from simulator.parallel import Task, TaskProgress, run_tasks
from tests.harness.report import RESULTS

_ORDER: Final = "earliest_due"
PLACEMENTS: Final = ("tailrace", "least_loaded", "prefix_affinity", "pascal", "ares", "arrow", "cascade")
# With their own orders.
OWN_ORDERS: Final = ("pascal", "arrow", "least_loaded")
CONTESTANTS: Final = (
    *(name if name == "tailrace" else f"{name}+{_ORDER}" for name in PLACEMENTS),
    *OWN_ORDERS,
)
SHARES: Final = (0.8, 1.1)
# What decides figures.
_DECIDE: Final = ("experiments.policies.grounds", "experiments.policies.measure", "simulator", "tailrace")
_HEAD: Final = Path(__file__).with_name("head.md")
_DOCS: Final = Path("docs")


def run(
    kept: KeptFigures,
    grounds: Sequence[str],
    traces: Path | None,
    seconds: float,
    seeds: int,
    sections: int,
    processes: int | None,
    console: Console,
) -> tuple[Found, dict[str, float]]:
    """Run what is not kept yet; return all figures, and the capacities by ground.

    `seeds`: of grounds whose arrivals are drawn; `sections`: of traces.
    """
    began_s = time.monotonic()

    def show(done: TaskProgress) -> None:
        if done.done % 20 == 0 or done.done == done.total:
            took_s = time.monotonic() - began_s
            console.print(f"{took_s:.0f} s: {done.done} of {done.total} ({done.share:.0%})", style="dim")

    def figures_of(runs: Sequence[Run]) -> dict[str, Figures]:
        by_name = {run.name: run for run in runs}
        known = {name: figures for name, run in by_name.items() if (figures := kept.get(run)) is not None}
        missing = [
            Task(run.name, run.measure, run.arguments, run.cost_s) for run in runs if run.name not in known
        ]
        made = run_tasks(
            missing,
            processes=processes,
            progress=show,
            succeeded=lambda name, figures: kept.add(by_name[name], figures),
        )
        return known | made

    def runs_of(ground: str) -> int:
        return sections if GROUNDS[ground].is_trace else seeds

    searched = figures_of([Run(name, capacity_per_s, (name, traces, seconds)) for name in grounds])
    capacities = {name: number(searched[name], "per_s") for name in grounds}
    cases = {
        (ground, share, policy, seed): Case(ground, policy, share * capacities[ground], seed)
        for ground in grounds
        for share in SHARES
        for policy in CONTESTANTS
        for seed in range(runs_of(ground))
    }
    measured = figures_of(
        [
            Run(case.name, measure, (case, traces, seconds, sections), case.rate_per_s)
            for case in cases.values()
        ]
    )
    found = {
        (ground, share): {
            policy: _by_figure(
                [measured[cases[ground, share, policy, seed].name] for seed in range(runs_of(ground))]
            )
            for policy in CONTESTANTS
        }
        for ground in grounds
        for share in SHARES
    }
    return found, capacities


def _by_figure(runs: Sequence[Figures]) -> dict[str, list[float]]:
    return {figure: [number(each, figure) for each in runs] for figure in runs[0]}


def main() -> None:
    """Run the comparison, and write the page and its plots."""
    parser = argparse.ArgumentParser(prog="python -m experiments.policies", description=__doc__)
    parser.add_argument(
        "--data", type=Path, default=os.environ.get("TAILRACE_DATA"), help="folder that contains traces/"
    )
    parser.add_argument("--only", nargs="+", choices=GROUNDS, default=list(GROUNDS))
    parser.add_argument("--seeds", type=int, default=10, help="of grounds whose arrivals are drawn")
    parser.add_argument("--sections", type=int, default=5, help="of traces")
    parser.add_argument("--seconds", type=float, default=600.0, help="of arrivals")
    parser.add_argument("--resume", type=Path, help="[default: one for each number of seconds]")
    parser.add_argument(
        "--docs",
        type=Path,
        help="where the page is written; one that is there keeps the grounds that are not run "
        f"[default: {_DOCS}, if all are]",
    )
    parser.add_argument("--processes", type=int)
    options = parser.parse_args()
    console = Console(stderr=True)
    traces = None if options.data is None else Path(options.data) / "traces"
    grounds = [name for name in options.only if traces is not None or not GROUNDS[name].is_trace]
    resume: Path = options.resume or RESULTS / f"policies-{options.seconds:g}s.jsonl"
    with closing(KeptFigures(resume, code_version(_DECIDE), traces)) as kept:
        if kept.dropped:
            console.print(f"runs of another version of the code are not used: {resume}")
        found, capacities = run(
            kept,
            grounds,
            traces,
            options.seconds,
            options.seeds,
            options.sections,
            options.processes,
            console,
        )
    head = _HEAD.read_text()
    head = head.format(seeds=options.seeds, sections=options.sections, seconds=f"{options.seconds:g}")
    lines = head.splitlines()
    docs: Path = options.docs or (_DOCS if len(grounds) == len(GROUNDS) else RESULTS)
    for ground in grounds_of(found):
        rates = {share: share * capacities[ground.name] for share in SHARES}
        lines += ["", *section(ground, SHARES, rates, found)[:-1]]
        image = docs / "images" / f"policies-{ground.name}.svg"
        image.parent.mkdir(parents=True, exist_ok=True)
        image.write_text(plot(ground, SHARES, found))
    page = docs / "policies-compared.md"
    text = "\n".join(lines) + "\n"
    if len(grounds) < len(GROUNDS) and page.exists():
        text = with_parts(page.read_text(), text)
    page.write_text(text)
    console.print(f"wrote {page}; runs are kept in {resume}")


if __name__ == "__main__":
    main()
