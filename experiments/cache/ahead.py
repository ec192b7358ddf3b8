"""Copy hot prefixes ahead of need (`copy_ahead`), in the simulator.

Crowds: documents of 20,000 tokens, each of which is asked about occasionally, and by many for six seconds,
among other prompts. Sessions: a minute of them, as in `placement.py`, at about 85% of the sustainable rate.
All policies get the same requests, on four instances of Llama 3.1 8B on H100.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Final

import numpy as np
from rich.console import Console
from rich.table import Table

from simulator.cluster import ClusterSpec
from simulator.request import SimRequest
from simulator.setups import setup_for
from simulator.simulation import simulate
from simulator.workloads.generators import SESSIONS
from tailrace.policy.deployment import Deployment
from tailrace.policy.parameters import Value
from tailrace.profiles import load_profile
from tailrace.slo import Slo
from tests.harness.report import save

PROFILE: Final = load_profile("llama-3.1-8b-h100")
_SLO: Final = Slo(5.0, 0.1)
_UNIT: Final = 64
_DOCUMENT_UNITS: Final = 312
_DOCUMENTS: Final = 3
_CROWD_S: Final = 6.0
_SECONDS: Final = 45.0
_SESSIONS_S: Final = 60.0

Draw = Callable[[int], list[SimRequest]]


def crowds(peak_per_s: float, others_per_s: float) -> Draw:
    """Return a generator, by seed, of questions about documents, at this rate for six seconds each, and of
    other prompts."""

    def draw(seed: int) -> list[SimRequest]:
        rng = random.Random(seed)
        requests: list[SimRequest] = []

        def ask(name: str, at_s: float, common: Sequence[int], own: int) -> None:
            number = len(requests)
            names = (*common, *(1_000_000 + 1_000 * number + unit for unit in range(own)))
            answer = rng.randint(20, 100)
            requests.append(
                SimRequest(f"{name}{number}", at_s, len(names) * _UNIT + 8, 0, answer, names, _UNIT)
            )

        for document in range(_DOCUMENTS):
            begin_s = 6.0 + document * (_SECONDS - 12.0) / _DOCUMENTS
            common, at_s = range(document * 1_000, document * 1_000 + _DOCUMENT_UNITS), begin_s - _CROWD_S
            while at_s < begin_s + _CROWD_S:
                at_s += rng.expovariate(0.5 if at_s < begin_s else peak_per_s)
                ask("document", at_s, common, 8)
        at_s = 0.0
        while at_s < _SECONDS:
            at_s += rng.expovariate(others_per_s)
            ask("other", at_s, (), rng.randint(20, 120))
        return requests

    return draw


def sessions(name: str, rate_per_s: float) -> Draw:
    """Return a generator, by seed, of a minute of sessions."""
    return lambda seed: list(SESSIONS[name].requests(round(_SESSIONS_S * rate_per_s), rate_per_s, seed))


WORKLOADS: Final[dict[str, Draw]] = {
    "crowds of 10/s, others 4/s": crowds(10.0, 4.0),
    "crowds of 10/s, others 8/s": crowds(10.0, 8.0),
    "crowds of 20/s, others 4/s": crowds(20.0, 4.0),
    "crowds of 20/s, others 8/s": crowds(20.0, 8.0),
    "crowds of 20/s, others 12/s": crowds(20.0, 12.0),
    "agent_sessions, 17.4/s": sessions("agent_sessions", 17.4),
    "document_sessions, 5.4/s": sessions("document_sessions", 5.4),
}
CONTESTANTS: Final[dict[str, dict[str, Value]]] = {
    "tailrace": {},
    "copy_ahead=true": {"copy_ahead": True},
    "pulls=false": {"pulls": False},
    "pulls=false copy_ahead=true": {"pulls": False, "copy_ahead": True},
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of a workload over all seeds, in seconds; for crowds, of the questions about documents only."""

    workload: str
    contestant: str
    ttft_mean_s: float
    ttft_p95_s: float
    ttft_p99_s: float
    # Of all requests; and the smallest and largest change of a seed relative to the policy without copies.
    all_mean_s: float
    change: tuple[float, float]
    found: float
    pulls: int
    copies: int


def measure(workload: str, seeds: int) -> list[Outcome]:
    """Simulate all contestants on the same requests."""
    outcomes: list[Outcome] = []
    before: list[float] = []
    for contestant, given in CONTESTANTS.items():
        ttft: list[float] = []
        all_ttfts: list[float] = []
        means: list[float] = []
        found = tokens = pulls = copies = 0
        for seed in range(1, seeds + 1):
            requests = WORKLOADS[workload](seed)
            setup = setup_for("tailrace").with_parameters(given)
            spec = setup.apply(ClusterSpec.uniform(4, PROFILE, prefix_caching=True))
            deployment = Deployment(_SLO, PROFILE)
            result = simulate(spec, requests, setup.policy(deployment), setup.intra(_SLO), seed=seed)
            asked = [r.ttft_s or 0.0 for r in result.requests if not r.request_id.startswith("other")]
            ttft += asked
            all_ttfts += [r.ttft_s or 0.0 for r in result.requests]
            means.append(float(np.mean(asked)))
            found += sum(r.cached_tokens for r in result.requests)
            tokens += sum(r.prompt_tokens for r in requests)
            copies += sum(pull.ahead for pull in result.pulls)
            pulls += sum(not pull.ahead for pull in result.pulls)
        if not given.get("copy_ahead"):
            before = means
        changes = [mean / other - 1.0 for mean, other in zip(means, before, strict=True)]
        p95, p99 = (float(np.quantile(ttft, q)) for q in (0.95, 0.99))
        all_mean_s = float(np.mean(all_ttfts))
        change = min(changes), max(changes)
        mean = float(np.mean(ttft))
        outcomes.append(
            Outcome(workload, contestant, mean, p95, p99, all_mean_s, change, found / tokens, pulls, copies)
        )
    return outcomes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; print a table."""
    parser = argparse.ArgumentParser(prog="python -m experiments.cache.ahead", description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", metavar="TEXT", default="", help="workloads whose name contains this")
    options = parser.parse_args(arguments)
    console = Console()
    outcomes: list[Outcome] = []
    columns = ("workload", "policy", "TTFT mean ms", "P95", "P99", "all mean", "change %", "cached %")
    table = Table(*columns, "pulls", "copies")
    for workload in WORKLOADS:
        if options.only not in workload:
            continue
        for each in measure(workload, options.seeds):
            outcomes.append(each)
            times = (each.ttft_mean_s, each.ttft_p95_s, each.ttft_p99_s, each.all_mean_s)
            low, high = (100 * change for change in each.change)
            change = f"{low:+.0f} to {high:+.0f}" if "copy_ahead" in each.contestant else ""
            shown = (*(f"{1e3 * t:.0f}" for t in times), change, f"{100 * each.found:.1f}")
            row = each.workload, each.contestant, *shown, str(each.pulls), str(each.copies)
            table.add_row(*row)
            print(" | ".join(row), file=sys.stderr, flush=True)
    console.print(table)
    path = save("cache_ahead", {"seeds": options.seeds, "outcomes": [asdict(each) for each in outcomes]})
    console.print(f"figures: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
