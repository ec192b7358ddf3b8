"""`make bench-cache`: placing by prefix against placing without, in the simulator, on Mooncake's
conversations.

Every instance keeps prefixes as vLLM does. Rates are 60, 85 and 110% of the highest, in steps of 25%, at
which `least_loaded` or `prefix_affinity` keeps the SLOs of nine requests in ten (Arrow's table 1: 30 s, 0.1 s
a token). Each seed is another stretch of the trace, with empty caches at its start. The hit rate stands
beside that of one cache without bounds that sees all requests of the stretch. Figures are means with the
half-width of their 95% confidence interval.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.grounds import GROUNDS, Ground
from benchmarks.report import machine, save
from simulator.cluster import ClusterSpec
from simulator.estimate import estimate
from simulator.request import SimRequest
from simulator.run import simulate
from simulator.setups import setup_for
from tailrace.policy.deployment import Deployment
from tailrace.policy.parameters import Value
from tailrace.profiles import load_profile
from tailrace.slo import Slo

SHARES: Final = (0.6, 0.85, 1.1)
_TARGET: Final = 0.9
_STEP: Final = 1.25
_SEARCH_SEED: Final = 1_000
_AWARE: Final[Mapping[str, Value]] = {"cache_aware": True}
# By how they are called in the tables: policy, and what is set of it.
CONTESTANTS: Final[Mapping[str, tuple[str, Mapping[str, Value]]]] = {
    "least_loaded": ("least_loaded", {}),
    "session": ("session", {}),
    "prefix_affinity": ("prefix_affinity", {}),
    **{name: (name, {}) for name in ("pascal", "ares", "arrow", "cascade")},
    **{f"{name}, cache_aware": (name, _AWARE) for name in ("pascal", "ares", "arrow", "cascade")},
    "tailrace": ("tailrace", {}),
    "tailrace, no pulls": ("tailrace", {"pulls": False}),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """One contestant, one rate, one seed. Times in seconds."""

    contestant: str
    share: float
    rate_per_s: float
    seed: int
    # Share of the prompt tokens that were found; and that one cache without bounds would have found.
    hit_rate: float
    unbounded_hit_rate: float
    attained: float
    goodput_per_s: float
    ttft_p50_s: float
    ttft_p99_s: float


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


def measure(contestant: str, share: float, rate: float, seed: int, seconds: float, traces: Path) -> Outcome:
    """Simulate one."""
    ground = _ground()
    requests = ground.draw(round(seconds * rate), rate, seed, traces)
    policy, given = CONTESTANTS[contestant]
    setup = setup_for(policy).with_parameters(given)
    if policy == "ares":
        # As in bench-policies: its prefill pool is for its own ground.
        setup = replace(setup, prefill_share=None)
    profile = load_profile(ground.profile)
    spec = setup.apply(ClusterSpec.uniform(ground.instances, profile, prefix_caching=True))
    deployment = Deployment(Slo(*ground.strictest()), profile)
    result = simulate(spec, requests, setup.policy(deployment), setup.intra(deployment.slo), seed=seed)
    ttft = np.array([r.ttft_s for r in result.requests if r.ttft_s is not None], dtype=np.float64)
    attained = sum(map(ground.good, result.requests)) / len(requests)
    return Outcome(
        contestant=contestant,
        share=share,
        rate_per_s=rate,
        seed=seed,
        hit_rate=sum(r.cached_tokens for r in result.requests) / sum(r.prompt_tokens for r in requests),
        unbounded_hit_rate=unbounded_hit_rate(requests),
        attained=attained,
        goodput_per_s=attained * rate,
        ttft_p50_s=float(np.quantile(ttft, 0.5)),
        ttft_p99_s=float(np.quantile(ttft, 0.99)),
    )


def _ground() -> Ground:
    return next(ground for ground in GROUNDS if ground.name == "mooncake")


def sustained(seconds: float, traces: Path) -> float:
    """The highest rate, in steps of 25%, at which one of the two attains its target."""

    def holds(rate: float) -> bool:
        return any(
            measure(name, 0.0, rate, _SEARCH_SEED, seconds, traces).attained >= _TARGET
            for name in ("prefix_affinity", "least_loaded")
        )

    rate = _ground().first_rate_per_s
    while not holds(rate):
        rate /= _STEP
    while holds(rate * _STEP):
        rate *= _STEP
    return rate


def run(
    contestants: Sequence[str], seeds: int, seconds: float, traces: Path, console: Console
) -> list[Outcome]:
    """All of them, on all cores."""
    outcomes: list[Outcome] = []
    rate = sustained(seconds, traces)
    console.print(f"sustained: {rate:.2f} requests/s")
    with (
        ProcessPoolExecutor(max_workers=os.cpu_count()) as pool,
        Progress(console=console, transient=True) as progress,
    ):
        runs = [
            pool.submit(measure, name, share, share * rate, seed, seconds, traces)
            for share in SHARES
            for name in contestants
            for seed in range(1, seeds + 1)
        ]
        task = progress.add_task("simulating", total=len(runs))
        for finished in as_completed(runs):
            outcomes.append(finished.result())
            progress.advance(task)
    order = list(contestants)
    return sorted(outcomes, key=lambda o: (o.share, order.index(o.contestant), o.seed))


def table(outcomes: Sequence[Outcome]) -> Table:
    """One row a rate and contestant."""
    result = Table(title="Mooncake's conversations, prefixes kept as vLLM does")
    for heading in ("load", "policy"):
        result.add_column(heading, no_wrap=True)
    for heading in ("hits %", "unbounded %", "SLO %", "goodput/s", "TTFT P50 s", "TTFT P99 s"):
        result.add_column(heading, justify="right")
    groups: dict[tuple[float, str], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.share, outcome.contestant), []).append(outcome)
    for (share, contestant), group in groups.items():
        result.add_row(
            f"{share:.0%}, {group[0].rate_per_s:.1f}/s",
            contestant,
            _text([100 * o.hit_rate for o in group], 1),
            _text([100 * o.unbounded_hit_rate for o in group], 1),
            _text([100 * o.attained for o in group], 1),
            _text([o.goodput_per_s for o in group], 2),
            _text([o.ttft_p50_s for o in group], 2),
            _text([o.ttft_p99_s for o in group], 2),
        )
    return result


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
    parser.add_argument("--only", default="", help="contestants, with semicolons between")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=300.0, help="how long requests arrive")
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    given = parser.parse_args(arguments)
    if given.data is None:
        parser.error(
            "Mooncake's trace is needed: --data or TAILRACE_DATA names the folder that traces/ is in"
        )
    console = Console(stderr=True)
    contestants = given.only.split(";") if given.only else list(CONTESTANTS)
    outcomes = run(contestants, given.seeds, given.seconds, Path(given.data), console)
    figures: dict[str, object] = {
        "seeds": given.seeds,
        "seconds": given.seconds,
        "runs": [asdict(outcome) for outcome in outcomes],
    }
    path = save("cache", figures)
    if given.output == "json":
        json.dump({"benchmark": "cache", "machine": machine(), **figures}, sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        # A file or a pipe has no width of its own.
        Console(width=None if sys.stdout.isatty() else 140).print(table(outcomes))
    console.print(f"saved to {path}")
    return path


if __name__ == "__main__":
    main()
