"""Placement by cached prefix against placement without, in the simulator.

On Mooncake's conversations (Arrow's SLOs: TTFT 30 s, 0.1 s per token) and on generated sessions of agents and
about documents (TTFT 5 s, as Yuan et al. count effective requests in "DualMap", ICLR 2026, and 0.1 s per
token). Every instance caches prefixes as vLLM does. Rates are 60, 85 and 110% of the highest, in steps of
25%, at which `least_loaded` or `prefix_affinity` meets the SLOs of 90% of requests. Each seed is another part
of the trace, or other sessions, with initially empty caches. The hit rate is shown next to that of a single
unbounded cache that sees all requests. Figures are means with the half-width of their 95% confidence
interval.

`host N GiB`: blocks that a device evicts stay in this much host memory of its instance; `copies at once`: and
copying them takes no time, which is an upper bound for copies that overlap with steps.

With `--resume FILE`, every finished simulation is added to a file and is not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
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

from experiments.scenarios import LLAMA, SCENARIOS, Scenario, Slo
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
from tests.harness.report import print_json, save, table_console

SHARES: Final = (0.6, 0.85, 1.1)
_TARGET: Final = 0.9
_STEP: Final = 1.25
_SEARCH_SEED: Final = 1_000
_SESSION_SLO_S: Final = (5.0, 0.1)
_GIB: Final = 1024**3


@dataclass(frozen=True, slots=True)
class Contestant:
    """A policy, its parameters, and the hardware that it runs on."""

    policy: str
    parameters: Mapping[str, Value] = field(default_factory=dict)
    # GiB of an instance's host memory that keep what the device evicts; 0: host memory is only for swapped
    # requests.
    host_gib: int = 0
    # Cost of copies to and from there; None: that of the profile.
    swap: SwapModel | None = None

    def limits(self) -> dict[str, object]:
        """Return limits of an instance, in addition to its prefix cache."""
        if not self.host_gib:
            return {}
        return {"host_caching": True, "host_kv_bytes": self.host_gib * _GIB}


_WITHOUT_HOST: Final[Mapping[str, Contestant]] = {
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
# An upper bound for copies that overlap with steps.
_FREE_COPIES: Final = SwapModel(base_ms=0.0, bytes_per_s=1e30)
_WITH_HOST: Final = ("least_loaded", "session", "prefix_affinity", "prefix_affinity, pulls", "tailrace")
# By name in the tables. 256 GiB: the simulator's default host memory for swapped requests; 64: about as much
# as the device has.
CONTESTANTS: Final[Mapping[str, Contestant]] = {
    **_WITHOUT_HOST,
    **{
        f"{name}, host {gib} GiB": replace(_WITHOUT_HOST[name], host_gib=gib)
        for name in _WITH_HOST
        for gib in (64, 256)
    },
    **{
        f"{name}, host 256 GiB, copies at once": replace(_WITHOUT_HOST[name], host_gib=256, swap=_FREE_COPIES)
        for name in _WITH_HOST
    },
}


def _sessions(name: str, first_rate_per_s: float) -> Scenario:
    def draw(count: int, rate_per_s: float, seed: int, traces: Path | None) -> Sequence[SimRequest]:
        return SESSIONS[name].requests(count, rate_per_s, seed)

    slo = Slo(name, *_SESSION_SLO_S)
    return Scenario(name, "", draw, LLAMA, 4, 150.0, (slo,), first_rate_per_s, needs_traces=False)


WORKLOADS: Final[Mapping[str, Scenario]] = {
    scenario.name: scenario
    for scenario in (
        next(scenario for scenario in SCENARIOS if scenario.name == "mooncake"),
        _sessions("agent_sessions", 40.0),
        _sessions("document_sessions", 10.0),
    )
}

# Compared seed by seed.
_COMPARED: Final = (
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
    """One simulation. `share`: of the sustainable rate; 0 in the search for that rate."""

    workload: str
    contestant: str
    share: float
    rate_per_s: float
    seed: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of a simulation. Times in seconds."""

    case: Case
    # Share of prompt tokens found in caches; and what a single unbounded cache would have found.
    hit_rate: float
    unbounded_hit_rate: float
    attained: float
    goodput_per_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    # Shares of all prompt tokens that came from other instances, and from host memory.
    pulled: float
    loaded: float = 0.0


def unbounded_hit_rate(requests: Iterable[SimRequest]) -> float:
    """Return the hit rate of a single cache that sees all requests, in order, and evicts nothing."""
    cached: set[int] = set()
    found = tokens = 0
    for request in requests:
        tokens += request.prompt_tokens
        for name in request.unit_names[: request.named_prompt_units]:
            if name not in cached:
                break
            found += request.unit_tokens
        cached.update(request.unit_names)
    return found / tokens


def measure(case: Case, traces: Path) -> Outcome:
    """Simulate one case."""
    scenario = WORKLOADS[case.workload]
    requests = scenario.draw(round(case.seconds * case.rate_per_s), case.rate_per_s, case.seed, traces)
    contestant = CONTESTANTS[case.contestant]
    setup = setup_for(contestant.policy).with_parameters(contestant.parameters)
    if contestant.policy == "ares":
        # As in bench-policies: its prefill pool is used only on its own workload.
        setup = replace(setup, prefill_share=None)
    profile = load_profile(scenario.profile)
    if contestant.swap is not None:
        profile = msgspec.structs.replace(profile, swap=contestant.swap)
    limits = {"prefix_caching": True, **contestant.limits()}
    spec = setup.apply(ClusterSpec.uniform(scenario.instances, profile, **limits))
    deployment = Deployment(PolicySlo(*scenario.strictest_slo()), profile)
    result = simulate(spec, requests, setup.policy(deployment), setup.intra(deployment.slo), seed=case.seed)
    ttft = np.array([r.ttft_s for r in result.requests if r.ttft_s is not None], dtype=np.float64)
    meets_slos = sum(map(scenario.meets_slos, result.requests))
    prompt_tokens = sum(r.prompt_tokens for r in requests)
    return Outcome(
        case=case,
        hit_rate=sum(r.cached_tokens for r in result.requests) / prompt_tokens,
        unbounded_hit_rate=unbounded_hit_rate(requests),
        attained=meets_slos / len(requests),
        # Sessions do not arrive at exactly their mean rate.
        goodput_per_s=meets_slos / requests[-1].arrival_s,
        ttft_p50_s=float(np.quantile(ttft, 0.5)),
        ttft_p99_s=float(np.quantile(ttft, 0.99)),
        pulled=sum(pull.tokens for pull in result.pulls) / prompt_tokens,
        loaded=sum(r.loaded_tokens for r in result.requests) / prompt_tokens,
    )


class FinishedCases:
    """Outcomes of earlier runs, in a file with one line each; empty without a file."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: dict[Case, Outcome] = {}
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                fields = json.loads(line)
                case = Case(**fields.pop("case"))
                self._known[case] = Outcome(case=case, **fields)

    def get(self, case: Case) -> Outcome | None:
        """Return the outcome of a case; None if it has not been simulated."""
        return self._known.get(case)

    def add(self, outcome: Outcome) -> None:
        """Store an outcome."""
        self._known[outcome.case] = outcome
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")


@dataclass(frozen=True)
class Plan:
    """The cases to simulate, and how."""

    workloads: Sequence[str]
    contestants: Sequence[str]
    # Of the sustainable rate.
    shares: Sequence[float]
    seeds: int
    seconds: float
    traces: Path
    jobs: int

    def sustained_rate(self, workload: str, outcome: Callable[[Case], Outcome]) -> float:
        """Return the highest rate, in steps of 25%, at which one of the two policies meets the target."""

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

    def cases(self, workload: str, sustained_rate: float) -> list[Case]:
        """Return the cases of one workload."""
        return [
            Case(workload, name, share, share * sustained_rate, seed, self.seconds)
            for seed in range(1, self.seeds + 1)
            for share in self.shares
            for name in self.contestants
        ]

    def run(self, finished: FinishedCases, console: Console) -> list[Outcome]:
        """Simulate all cases that are not finished; return all outcomes in table order."""

        def outcome(case: Case) -> Outcome:
            cached = finished.get(case)
            if cached is None:
                finished.add(cached := measure(case, self.traces))
            return cached

        cases: list[Case] = []
        for workload in self.workloads:
            rate = self.sustained_rate(workload, outcome)
            console.print(f"{workload}: {rate:.2f} requests/s are sustainable")
            cases += self.cases(workload, rate)
        # Simulate all cases of a seed before the next one, so that a run that is interrupted has all rows.
        remaining = sorted((case for case in cases if finished.get(case) is None), key=lambda case: case.seed)
        with (
            ProcessPoolExecutor(max_workers=self.jobs) as pool,
            Progress(console=console, transient=True) as progress,
        ):
            task = progress.add_task("simulating", total=len(cases), completed=len(cases) - len(remaining))
            try:
                for done in as_completed([pool.submit(measure, case, self.traces) for case in remaining]):
                    finished.add(done.result())
                    progress.advance(task)
            except BaseException:
                # Otherwise all other simulations would finish first, for nothing.
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        order = {name: place for place, name in enumerate(self.contestants)}
        cases.sort(key=lambda case: (self.workloads.index(case.workload), case.share, order[case.contestant]))
        return [outcome(case) for case in cases]


def table(workload: str, outcomes: Sequence[Outcome]) -> Table:
    """Return a table with one row per rate and contestant."""
    result = Table(title=f"{workload}: prefix caching as in vLLM")
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


def paired_changes(outcomes: Iterable[Outcome], ours: str, theirs: str) -> list[str]:
    """Return how `ours` differs from `theirs` on the same requests, in goodput and P99 TTFT, one line per
    load."""
    cached = {(o.case.workload, o.case.share, o.case.contestant, o.case.seed): o for o in outcomes}
    rows: dict[tuple[str, float], list[tuple[float, float]]] = {}
    for (workload, share, contestant, seed), outcome in cached.items():
        other = cached.get((workload, share, theirs, seed))
        if contestant == ours and other is not None:
            change = (
                outcome.goodput_per_s / other.goodput_per_s - 1.0,
                outcome.ttft_p99_s / other.ttft_p99_s - 1.0,
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
    """Run the benchmark; return the path of the figures."""
    parser = argparse.ArgumentParser(prog="python -m experiments.cache.placement", description=__doc__)
    parser.add_argument(
        "--data", type=Path, default=os.environ.get("TAILRACE_DATA"), help="folder that contains traces/"
    )
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="comma-separated")
    parser.add_argument("--only", default=";".join(CONTESTANTS), help="contestants, semicolon-separated")
    parser.add_argument(
        "--shares", default=",".join(map(str, SHARES)), help="shares of the sustainable rate, comma-separated"
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=150.0, help="duration of arrivals")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="parallel simulations")
    parser.add_argument("--resume", type=Path, help="file of finished simulations, which is extended")
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    options = parser.parse_args(arguments)
    if options.data is None:
        parser.error(
            "Mooncake's trace is missing: set --data or TAILRACE_DATA to the folder that contains traces/"
        )
    console = Console(stderr=True)
    plan = Plan(
        workloads=options.workloads.split(","),
        contestants=options.only.split(";"),
        shares=[float(share) for share in options.shares.split(",")],
        seeds=options.seeds,
        seconds=options.seconds,
        traces=Path(options.data),
        jobs=options.jobs,
    )
    outcomes = plan.run(FinishedCases(options.resume), console)
    figures: dict[str, object] = {
        "seeds": options.seeds,
        "seconds": options.seconds,
        "runs": [asdict(outcome) for outcome in outcomes],
    }
    path = save("cache", figures)
    if options.output == "json":
        print_json("cache", figures)
    else:
        printed = table_console(140)
        for workload in plan.workloads:
            printed.print(table(workload, [o for o in outcomes if o.case.workload == workload]))
        for ours, theirs in _COMPARED:
            for line in paired_changes(outcomes, ours, theirs):
                printed.print(line)
    console.print(f"saved to {path}")
    return path


if __name__ == "__main__":
    main()
