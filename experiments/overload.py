"""The first part of `make bench-overload` in the simulator.

The same engines, arrivals and limits, metered by the same code as in a front end, in as many stretches of
time as P99 needs, and with different amounts of its rate that the tenant beyond its limit has saved up. What
refusals cost is not simulated.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.overload.figures import at_random
from benchmarks.overload.front_end import (
    LIMIT_PER_MINUTE,
    OUTPUT_TOKENS,
    PROFILE,
    PROMPT_TOKENS,
    SPEED,
    WORKERS,
)
from simulator.cluster import ClusterSpec
from simulator.request import SimRequest
from simulator.setups import setup_for
from simulator.simulation import simulate
from tailrace.policy.deployment import Deployment
from tailrace.profiles import load_profile
from tailrace.tenancy.keys import Tenant
from tailrace.tenancy.meter import Meter
from tests.harness.loadgen import percentile
from tests.harness.report import print_json, save
from worker_agent.engine.simulated.settings import at_speed

# Requests per second that two of these engines serve, measured by `make bench-overload`.
CAPACITY = 16.8
# How far the tenant beyond its limit goes.
FACTOR = 10
# Prefix of the request IDs of the tenant whose TTFT is reported.
_OWN = "own-"


@dataclass(frozen=True, slots=True)
class Case:
    """The result of one case over all stretches."""

    case: str
    admitted_per_s: float
    ttft_p99_s: float
    # To the case of a tenant at its limit.
    ratio: float


def metered(times_s: Iterable[float], saved_up: int) -> list[float]:
    """Return which of these requests of a limited tenant are admitted, if it has saved up so many."""
    meter, tenant = Meter(), Tenant(name="other", requests_per_minute=float(LIMIT_PER_MINUTE))
    # Its bucket starts full.
    for _ in range(LIMIT_PER_MINUTE - saved_up):
        meter.begin(tenant, 0.0)
    return [at_s for at_s in times_s if meter.begin(tenant, at_s) is None]


def own_ttfts(own_s: Iterable[float], other_s: Iterable[float], seed: int) -> list[float]:
    """Simulate both tenants' requests; return the TTFTs of the first one's, in seconds."""
    arrivals = sorted([(at_s, _OWN) for at_s in own_s] + [(at_s, "other-") for at_s in other_s])
    requests = [
        SimRequest(f"{tenant}{number}", at_s, PROMPT_TOKENS, 0, OUTPUT_TOKENS)
        for number, (at_s, tenant) in enumerate(arrivals)
    ]
    profile = msgspec.structs.replace(at_speed(load_profile(PROFILE), SPEED), name="slow")
    setup = setup_for("least_loaded")
    cluster = setup.apply(ClusterSpec.uniform(WORKERS, profile))
    policy = setup.policy(Deployment(profile=profile))
    result = simulate(cluster, requests, policy, setup.intra(), seed=seed)
    return [
        record.ttft_s
        for request, record in zip(requests, result.requests, strict=True)
        if request.request_id.startswith(_OWN) and record.ttft_s is not None
    ]


def measure(stretches: int, seconds: float) -> list[Case]:
    """Run all cases, with the same arrivals of the first tenant in each."""
    limit = LIMIT_PER_MINUTE / 60

    def beyond(saved_up: int) -> Callable[[int], list[float]]:
        return lambda seed: metered(at_random(FACTOR * limit, seconds, 1_000 + seed), saved_up)

    at_limit = "at its limit"
    cases: dict[str, Callable[[int], list[float]]] = {
        "nothing": lambda seed: [],
        at_limit: lambda seed: metered(at_random(limit, seconds, 1_000 + seed), 0),
        f"at {FACTOR} times its limit, nothing saved up": beyond(0),
        **{f"the same, {saved_up} s saved up": beyond(saved_up) for saved_up in (5, 10, LIMIT_PER_MINUTE)},
    }
    ttfts: dict[str, list[float]] = {case: [] for case in cases}
    admitted = dict.fromkeys(cases, 0)
    for seed in range(stretches):
        own_s = list(at_random(CAPACITY / 2, seconds, seed))
        for case, other in cases.items():
            other_s = other(seed)
            admitted[case] += len(other_s)
            ttfts[case] += own_ttfts(own_s, other_s, seed)
    base = percentile(ttfts[at_limit], 0.99)
    results = []
    for case, values in ttfts.items():
        p99 = percentile(values, 0.99)
        results.append(Case(case, admitted[case] / stretches / seconds, p99, p99 / base))
    return results


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m experiments.overload", description=__doc__)
    parser.add_argument("--stretches", type=int, default=36)
    parser.add_argument("--seconds", type=float, default=40.0, help="of arrivals, each stretch")
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    options = parser.parse_args()
    results = measure(options.stretches, options.seconds)
    figures: dict[str, object] = {"cases": [asdict(case) for case in results]}
    path = save("overload_simulated", figures)
    if options.output == "json":
        print_json("overload_simulated", figures)
        return 0
    table = Table("the other tenant sends", "admitted/s", "P99 TTFT s", "against 'at its limit'")
    for case in results:
        table.add_row(case.case, f"{case.admitted_per_s:.2f}", f"{case.ttft_p99_s:.3f}", f"{case.ratio:.2f}")
    console = Console()
    console.print(table)
    console.print(f"figures: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
