"""`make bench-cache`: placing by prefix against placing without, in the simulator.

On Mooncake's conversations (Arrow's SLOs: 30 s to the first token, 0.1 s a token) and on generated sessions
of agents and about documents (5 s, as Yuan et al. count effective requests in "DualMap", ICLR 2026, and
0.1 s a token). Every instance keeps prefixes as vLLM does. Rates are 60, 85 and 110% of the highest, in steps
of 25%, at which `least_loaded` or `prefix_affinity` keeps the SLOs of nine requests in ten. Each seed is
another stretch of the trace, or other sessions, with empty caches at its start. The hit rate stands beside
that of one cache without bounds that sees all requests of the stretch. Figures are means with the half-width
of their 95% confidence interval.

`host N GiB`: what a device evicts stays in so much host memory of its instance; `copies at once`: and is
copied there and back in no time, which is the most that copies beside the steps could bring.

With `--resume FILE` every finished simulation is added to a file, and is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.grounds import GROUNDS, LLAMA, Ground, Slo
from benchmarks.report import print_json, save
from simulator.cluster import ClusterSpec
from simulator.estimate import estimate
from simulator.request import SimRequest
from simulator.setups import setup_for
from simulator.simulation import simulate
from simulator.workloads.generators import SESSIONS
from tailrace.policy.deployment import Deployment
from tailrace.policy.parameters import Value
from tailrace.profiles import SwapModel, load_profile
from tailrace.slo import Slo as PolicySlo

SHARES: Final = (0.6, 0.85, 1.1)
_TARGET: Final = 0.9
_STEP: Final = 1.25
_SEARCH_SEED: Final = 1_000
_SESSION_SLO_S: Final = (5.0, 0.1)
_GIB: Final = 1024**3


@dataclass(frozen=True, slots=True)
class Contestant:
    """A policy, what is set of it, and what it runs on."""

    policy: str
    given: Mapping[str, Value] = field(default_factory=dict)
    # GiB of an instance's host memory, which keep what the device evicts; 0: they are for swapped requests
    # alone.
    host_gib: int = 0
    # What copies to and from there take; None: what the profile says.
    swap: SwapModel | None = None

    def limits(self) -> dict[str, object]:
        """Of an instance, besides its prefix cache."""
        if not self.host_gib:
            return {}
        return {"host_caching": True, "host_kv_bytes": self.host_gib * _GIB}


_PLAIN: Final[Mapping[str, Contestant]] = {
    "least_loaded": Contestant("least_loaded"),
    "session": Contestant("session"),
    "prefix_affinity": Contestant("prefix_affinity"),
    "prefix_affinity, pulls": Contestant("prefix_affinity", {"pulls": True}),
    **{name: Contestant(name) for name in ("pascal", "ares", "arrow", "cascade")},
    **{
        f"{name}, cache_aware": Contestant(name, {"cache_aware": True})
        for name in ("pascal", "ares", "arrow", "cascade")
    },
    "tailrace": Contestant("tailrace"),
    "tailrace, no pulls": Contestant("tailrace", {"pulls": False}),
}
# The most that could be had by making them beside the steps.
_AT_ONCE: Final = SwapModel(base_ms=0.0, bytes_per_s=1e30)
_WITH_HOST: Final = ("least_loaded", "session", "prefix_affinity", "prefix_affinity, pulls", "tailrace")
# By how they are called in the tables. 256 GiB: what the simulator gives an instance for swapped requests;
# 64: about what its device has.
CONTESTANTS: Final[Mapping[str, Contestant]] = {
    **_PLAIN,
    **{
        f"{name}, host {gib} GiB": replace(_PLAIN[name], host_gib=gib)
        for name in _WITH_HOST
        for gib in (64, 256)
    },
    **{
        f"{name}, host 256 GiB, copies at once": replace(_PLAIN[name], host_gib=256, swap=_AT_ONCE)
        for name in _WITH_HOST
    },
}


def _sessions(name: str, first_rate_per_s: float) -> Ground:
    def draw(count: int, rate_per_s: float, seed: int, traces: Path | None) -> Sequence[SimRequest]:
        return SESSIONS[name].requests(count, rate_per_s, seed)

    slo = Slo(name, *_SESSION_SLO_S)
    return Ground(name, "", draw, LLAMA, 4, 150.0, (slo,), first_rate_per_s, needs_traces=False)


WORKLOADS: Final[Mapping[str, Ground]] = {
    ground.name: ground
    for ground in (
        next(ground for ground in GROUNDS if ground.name == "mooncake"),
        _sessions("agent_sessions", 40.0),
        _sessions("document_sessions", 10.0),
    )
}

# Told apart seed by seed.
_PAIRS: Final = (
    ("tailrace", "prefix_affinity"),
    ("tailrace", "tailrace, no pulls"),
    *(
        (f"{name}, {host}", name)
        for name in _WITH_HOST
        for host in ("host 64 GiB", "host 256 GiB", "host 256 GiB, copies at once")
    ),
)


@dataclass(frozen=True, slots=True)
class Case:
    """One simulation. `share`: of what can be sustained; 0 in the search for that."""

    workload: str
    contestant: str
    share: float
    rate_per_s: float
    seed: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of it. Times in seconds."""

    case: Case
    # Share of the prompt tokens that were found; and that one cache without bounds would have found.
    hit_rate: float
    unbounded_hit_rate: float
    attained: float
    goodput_per_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    # Of all prompt tokens, those that came from other instances, and those that came from host memory.
    pulled: float
    loaded: float = 0.0


def unbounded_hit_rate(requests: Iterable[SimRequest]) -> float:
    """Of one cache that sees all of them, in order, and forgets nothing."""
    known: set[int] = set()
    found = tokens = 0
    for request in requests:
        tokens += request.prompt_tokens
        for name in request.unit_names[: request.named_prompt_units]:
            if name not in known:
                break
            found += request.unit_tokens
        known.update(request.unit_names)
    return found / tokens


def measure(case: Case, traces: Path) -> Outcome:
    """Simulate one."""
    ground = WORKLOADS[case.workload]
    requests = ground.draw(round(case.seconds * case.rate_per_s), case.rate_per_s, case.seed, traces)
    contestant = CONTESTANTS[case.contestant]
    setup = setup_for(contestant.policy).with_parameters(contestant.given)
    if contestant.policy == "ares":
        # As in bench-policies: its prefill pool is for its own ground.
        setup = replace(setup, prefill_share=None)
    profile = load_profile(ground.profile)
    if contestant.swap is not None:
        profile = msgspec.structs.replace(profile, swap=contestant.swap)
    limits = {"prefix_caching": True, **contestant.limits()}
    spec = setup.apply(ClusterSpec.uniform(ground.instances, profile, **limits))
    deployment = Deployment(PolicySlo(*ground.strictest()), profile)
    result = simulate(spec, requests, setup.policy(deployment), setup.intra(deployment.slo), seed=case.seed)
    ttft = np.array([r.ttft_s for r in result.requests if r.ttft_s is not None], dtype=np.float64)
    good = sum(map(ground.good, result.requests))
    prompt_tokens = sum(r.prompt_tokens for r in requests)
    return Outcome(
        case=case,
        hit_rate=sum(r.cached_tokens for r in result.requests) / prompt_tokens,
        unbounded_hit_rate=unbounded_hit_rate(requests),
        attained=good / len(requests),
        # Sessions do not come at exactly their mean rate.
        goodput_per_s=good / requests[-1].arrival_s,
        ttft_p50_s=float(np.quantile(ttft, 0.5)),
        ttft_p99_s=float(np.quantile(ttft, 0.99)),
        pulled=sum(pull.tokens for pull in result.pulls) / prompt_tokens,
        loaded=sum(r.loaded_tokens for r in result.requests) / prompt_tokens,
    )


class Finished:
    """Outcomes that need not be simulated again, in a file of a line each; without a file, none."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: dict[Case, Outcome] = {}
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                fields = json.loads(line)
                case = Case(**fields.pop("case"))
                self._known[case] = Outcome(case=case, **fields)

    def get(self, case: Case) -> Outcome | None:
        """None: it has not been simulated."""
        return self._known.get(case)

    def add(self, outcome: Outcome) -> None:
        """It need not be simulated again."""
        self._known[outcome.case] = outcome
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")


@dataclass(frozen=True)
class Plan:
    """What is to be simulated, and how."""

    workloads: Sequence[str]
    contestants: Sequence[str]
    # Of what can be sustained.
    shares: Sequence[float]
    seeds: int
    seconds: float
    traces: Path
    jobs: int

    def sustained(self, workload: str, outcome: Callable[[Case], Outcome]) -> float:
        """The highest rate, in steps of 25%, at which one of the two attains its target."""

        def holds(rate: float) -> bool:
            return any(
                outcome(Case(workload, name, 0.0, rate, _SEARCH_SEED, self.seconds)).attained >= _TARGET
                for name in ("prefix_affinity", "least_loaded")
            )

        rate = WORKLOADS[workload].first_rate_per_s
        while not holds(rate):
            rate /= _STEP
        while holds(rate * _STEP):
            rate *= _STEP
        return rate

    def cases(self, workload: str, sustained: float) -> list[Case]:
        """Those of one workload."""
        return [
            Case(workload, name, share, share * sustained, seed, self.seconds)
            for seed in range(1, self.seeds + 1)
            for share in self.shares
            for name in self.contestants
        ]

    def run(self, finished: Finished, console: Console) -> list[Outcome]:
        """All of them."""

        def outcome(case: Case) -> Outcome:
            known = finished.get(case)
            if known is None:
                finished.add(known := measure(case, self.traces))
            return known

        cases: list[Case] = []
        for workload in self.workloads:
            rate = self.sustained(workload, outcome)
            console.print(f"{workload}: {rate:.2f} requests/s can be sustained")
            cases += self.cases(workload, rate)
        # One seed of everything before the next: whoever ends it early has all rows.
        left = sorted((case for case in cases if finished.get(case) is None), key=lambda case: case.seed)
        with (
            ProcessPoolExecutor(max_workers=self.jobs) as pool,
            Progress(console=console, transient=True) as progress,
        ):
            task = progress.add_task("simulating", total=len(cases), completed=len(cases) - len(left))
            try:
                for done in as_completed([pool.submit(measure, case, self.traces) for case in left]):
                    finished.add(done.result())
                    progress.advance(task)
            except BaseException:
                # Else all others are simulated first, for nobody.
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        order = {name: place for place, name in enumerate(self.contestants)}
        cases.sort(key=lambda case: (self.workloads.index(case.workload), case.share, order[case.contestant]))
        return [outcome(case) for case in cases]


def table(workload: str, outcomes: Sequence[Outcome]) -> Table:
    """One row a rate and contestant."""
    result = Table(title=f"{workload}: prefixes kept as vLLM does")
    for heading in ("load", "policy"):
        result.add_column(heading, no_wrap=True)
    for heading in (
        "hits %",
        "unbounded %",
        "pulled %",
        "loaded %",
        "SLO %",
        "goodput/s",
        "TTFT P50 s",
        "TTFT P99 s",
    ):
        result.add_column(heading, justify="right")
    groups: dict[tuple[float, str], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.case.share, outcome.case.contestant), []).append(outcome)
    for (share, contestant), group in groups.items():
        result.add_row(
            f"{share:.0%}, {group[0].case.rate_per_s:.1f}/s",
            contestant,
            _text([100 * o.hit_rate for o in group], 1),
            _text([100 * o.unbounded_hit_rate for o in group], 1),
            _text([100 * o.pulled for o in group], 1),
            _text([100 * o.loaded for o in group], 1),
            _text([100 * o.attained for o in group], 1),
            _text([o.goodput_per_s for o in group], 2),
            _text([o.ttft_p50_s for o in group], 2),
            _text([o.ttft_p99_s for o in group], 2),
        )
    return result


def against(outcomes: Iterable[Outcome], ours: str, theirs: str) -> list[str]:
    """By how much `ours` is ahead of `theirs` on the same requests, or behind: goodput and P99."""
    known = {(o.case.workload, o.case.share, o.case.contestant, o.case.seed): o for o in outcomes}
    rows: dict[tuple[str, float], list[tuple[float, float]]] = {}
    for (workload, share, contestant, seed), mine in known.items():
        other = known.get((workload, share, theirs, seed))
        if contestant == ours and other is not None:
            change = (
                mine.goodput_per_s / other.goodput_per_s - 1.0,
                mine.ttft_p99_s / other.ttft_p99_s - 1.0,
            )
            rows.setdefault((workload, share), []).append(change)
    return [
        f"{workload} at {share:.0%}: {ours} against {theirs}: goodput {_percent([g for g, _ in changes])}, "
        f"TTFT P99 {_percent([t for _, t in changes])}"
        for (workload, share), changes in rows.items()
    ]


def _percent(changes: Sequence[float]) -> str:
    return f"{_text([100 * change for change in changes], 1)}%"


def _text(values: Sequence[float], places: int) -> str:
    found = estimate(values)
    half = "" if found.half_width is None else f" ±{found.half_width:.{places}f}"
    return f"{found.mean:.{places}f}{half}"


def main(arguments: Sequence[str] | None = None) -> Path:
    """Run the benchmark; returns where the figures are."""
    parser = argparse.ArgumentParser(prog="make bench-cache", description=__doc__)
    parser.add_argument(
        "--data", type=Path, default=os.environ.get("TAILRACE_DATA"), help="folder of traces/"
    )
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="with commas between")
    parser.add_argument("--only", default=";".join(CONTESTANTS), help="contestants, with semicolons between")
    parser.add_argument("--shares", default=",".join(map(str, SHARES)), help="loads, with commas between")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=150.0, help="how long requests arrive")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="simulations at a time")
    parser.add_argument("--resume", type=Path, help="file of finished simulations; added to")
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    given = parser.parse_args(arguments)
    if given.data is None:
        parser.error(
            "Mooncake's trace is needed: --data or TAILRACE_DATA names the folder that traces/ is in"
        )
    console = Console(stderr=True)
    plan = Plan(
        workloads=given.workloads.split(","),
        contestants=given.only.split(";"),
        shares=[float(share) for share in given.shares.split(",")],
        seeds=given.seeds,
        seconds=given.seconds,
        traces=Path(given.data),
        jobs=given.jobs,
    )
    outcomes = plan.run(Finished(given.resume), console)
    figures: dict[str, object] = {
        "seeds": given.seeds,
        "seconds": given.seconds,
        "runs": [asdict(outcome) for outcome in outcomes],
    }
    path = save("cache", figures)
    if given.output == "json":
        print_json("cache", figures)
    else:
        # A file or a pipe has no width of its own.
        printed = Console(width=None if sys.stdout.isatty() else 140)
        for workload in plan.workloads:
            printed.print(table(workload, [o for o in outcomes if o.case.workload == workload]))
        for ours, theirs in _PAIRS:
            for line in against(outcomes, ours, theirs):
                printed.print(line)
    console.print(f"saved to {path}")
    return path


if __name__ == "__main__":
    main()
