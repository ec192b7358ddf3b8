"""All policies with the batch order `earliest_due`, and some with their own, on eight grounds.

Rates are shares of the highest one, found by bisection with another seed, at which `least_loaded` or
`tailrace` keeps the SLOs of 90% of the requests. Of each run the first fifth of the arrivals and the last
twentieth are not counted. A seed is another section of a trace, or other draws. Means over the seeds; a
policy is the best only if no other cannot be distinguished from it, paired by seed, at 95%.

Every finished run is added to the file of `--resume`, and is not repeated.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console

from experiments.policies.grounds import GROUNDS, Case
from experiments.policies.measure import capacity_per_s, measure
from experiments.policies.page import Found, grounds_of, plot, section
from simulator.parallel import Progress, Task, run_tasks
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
_HEAD: Final = Path(__file__).with_name("head.md")
_DOCS: Final = Path("docs")


class Kept(msgspec.Struct):
    """A finished run, or a capacity in requests per second."""

    name: str
    figures: dict[str, float]


class Store:
    """The finished runs, in a file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.runs: dict[str, dict[str, float]] = {}
        if path.exists():
            for line in path.read_bytes().splitlines():
                kept = msgspec.json.decode(line, type=Kept)
                self.runs[kept.name] = kept.figures

    def add(self, name: str, figures: dict[str, float]) -> None:
        """Keep a run."""
        self.runs[name] = figures
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(Kept(name, figures)) + b"\n")


def run(
    store: Store,
    grounds: Sequence[str],
    traces: Path | None,
    seconds: float,
    seeds: int,
    processes: int | None,
    console: Console,
) -> tuple[Found, dict[str, float]]:
    """Run what is not kept yet; return all figures, and the capacities by ground."""
    began_s = time.monotonic()

    def show(done: Progress) -> None:
        if done.done % 20 == 0 or done.done == done.total:
            took_s = time.monotonic() - began_s
            console.print(f"{took_s:.0f} s: {done.done} of {done.total} ({done.share:.0%})", style="dim")

    searches = [Task(f"capacity/{name}", capacity_per_s, (name, traces, seconds)) for name in grounds]
    missing = [task for task in searches if task.name not in store.runs]
    run_tasks(missing, processes=processes, progress=show, succeeded=store.add)
    capacities = {name: store.runs[f"capacity/{name}"]["per_s"] for name in grounds}
    cases = {
        (ground, share, policy, seed): Case(ground, policy, share * capacities[ground], seed)
        for ground in grounds
        for share in SHARES
        for policy in CONTESTANTS
        for seed in range(seeds)
    }
    tasks = [
        Task(case.name, measure, (case, traces, seconds, seeds), case.rate_per_s)
        for case in cases.values()
        if case.name not in store.runs
    ]
    run_tasks(tasks, processes=processes, progress=show, succeeded=store.add)
    found = {}
    for ground in grounds:
        for share in SHARES:
            found[ground, share] = {
                policy: _by_figure(
                    [store.runs[cases[ground, share, policy, seed].name] for seed in range(seeds)]
                )
                for policy in CONTESTANTS
            }
    return found, capacities


def _by_figure(runs: Sequence[dict[str, float]]) -> dict[str, list[float]]:
    return {figure: [each[figure] for each in runs] for figure in runs[0]}


def main() -> None:
    """Run the comparison, and write the page and its plots."""
    parser = argparse.ArgumentParser(prog="python -m experiments.policies", description=__doc__)
    parser.add_argument(
        "--data", type=Path, default=os.environ.get("TAILRACE_DATA"), help="folder that contains traces/"
    )
    parser.add_argument("--only", nargs="+", choices=GROUNDS, default=list(GROUNDS))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=600.0, help="of arrivals")
    parser.add_argument("--resume", type=Path, help="[default: one for each number of seconds and seeds]")
    parser.add_argument("--docs", type=Path, default=_DOCS, help="where the page is written")
    parser.add_argument("--processes", type=int)
    options = parser.parse_args()
    console = Console(stderr=True)
    traces = None if options.data is None else Path(options.data) / "traces"
    grounds = [name for name in options.only if traces is not None or not GROUNDS[name].is_trace]
    resume: Path = options.resume or RESULTS / f"policies-{options.seeds}x{options.seconds:g}s.jsonl"
    resume.parent.mkdir(parents=True, exist_ok=True)
    found, capacities = run(
        Store(resume), grounds, traces, options.seconds, options.seeds, options.processes, console
    )
    lines = _HEAD.read_text().format(seeds=options.seeds, seconds=f"{options.seconds:g}").splitlines()
    for ground in grounds_of(found):
        rates = {share: share * capacities[ground.name] for share in SHARES}
        lines += ["", *section(ground, SHARES, rates, found)[:-1]]
        image = options.docs / "images" / f"policies-{ground.name}.svg"
        image.parent.mkdir(parents=True, exist_ok=True)
        image.write_text(plot(ground, SHARES, found))
    page = options.docs / "policies-compared.md"
    page.write_text("\n".join(lines) + "\n")
    console.print(f"wrote {page}; runs are kept in {resume}")


if __name__ == "__main__":
    main()
