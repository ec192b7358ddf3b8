"""`make bench-decisions`: the scheduler's cost of a decision, and how it scales with the cluster.

Placement is timed for every installed policy, and the more expensive decision points for the policies that
have them, on clusters of 16 to 1,024 instances with 100 requests each. Growth is the exponent p of the fit
cost ~ instances^p: 0 is constant, 1 linear.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.clusters import REQUESTS_PER_INSTANCE, arrivals, cluster
from tailrace.actions import SetStages
from tailrace.cache.index import CacheIndex
from tailrace.cluster import CachedTokens, ClusterView, Phase, Pool, Stage
from tailrace.lengths import LengthStatistics
from tailrace.policy.base import Policy
from tailrace.policy.cascade.planner import Costs, Plan, exact, heuristic
from tailrace.policy.cascade.policy import Cascade
from tailrace.policy.cascade.workload import Traffic, bucket_edges
from tailrace.policy.registry import load, names
from tests.harness.loadgen import percentile
from tests.harness.report import print_json, save, table_console

SIZES = (16, 64, 256, 1_024)

# Makes the n-th call of a decision.
Call = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class Case:
    """A decision to time: `prepare` sets it up for a number of instances."""

    name: str
    prepare: Callable[[int], Call]
    sizes: tuple[int, ...] = SIZES


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds of a decision on a cluster: CPU time of the thread, and wall-clock time.

    On a shared machine, wall-clock time includes waiting for a core.
    """

    decision: str
    instances: int
    calls: int
    p50_us: float
    p99_us: float
    wall_p50_us: float
    wall_p99_us: float


def placement(policy: Policy) -> Callable[[int], Call]:
    """Time a placement."""

    def prepare(instances: int) -> Call:
        view, new = cluster(instances), arrivals(1_000)
        return lambda n: policy.place(view, new[n % len(new)], 0.0)

    return prepare


def placement_on_new_reports(policy: Policy) -> Callable[[int], Call]:
    """Time a placement after new reports of every instance: nothing cached can be used."""

    def prepare(instances: int) -> Call:
        views, new = [cluster(instances), cluster(instances, 2)], arrivals(1_000)
        return lambda n: policy.place(views[n % 2], new[n % len(new)], 0.0)

    return prepare


def placement_with_cached_prefixes(policy: Policy) -> Callable[[int], Call]:
    """Time a placement when every instance has cached a prefix of the prompt: the remaining prefill
    differs."""

    def prepare(instances: int) -> Call:
        view, new = cluster(instances), arrivals(1_000)
        cached = dict.fromkeys(view.instances, CachedTokens(64, 64))
        with_cached = [replace(each, cached=cached) for each in new]
        return lambda n: policy.place(view, with_cached[n % len(with_cached)], 0.0)

    return prepare


def lookup(instances: int) -> Call:
    """Time a lookup of 200 blocks, of which all instances have the first 64 and one has all, in an index of a
    million."""
    shared, index, own_blocks = full_index(instances)
    names = [[*shared, *blocks[:136]] for blocks in own_blocks]
    return lambda n: index.match(names[n % len(names)])


def update(instances: int) -> Call:
    """Time the addition of 1,000 blocks of an instance, and their removal in the next call, in an index of a
    million."""
    _, index, _ = full_index(instances)
    rng = random.Random(2)
    new_blocks = [[rng.getrandbits(64) for _ in range(1_000)] for _ in range(50)]
    return lambda n: index.change(
        "i0", () if n % 2 else new_blocks[n // 2 % 50], new_blocks[n // 2 % 50] if n % 2 else ()
    )


def full_index(instances: int) -> tuple[list[int], CacheIndex, list[list[int]]]:
    """Return (names that all instances have, an index of a million, names that each instance has alone)."""
    rng, index = random.Random(1), CacheIndex()
    shared = [rng.getrandbits(64) for _ in range(64)]
    own_blocks = [[rng.getrandbits(64) for _ in range(1_000_000 // instances)] for _ in range(instances)]
    for number, blocks in enumerate(own_blocks):
        index.change(f"i{number}", [*shared, *blocks], ())
    return shared, index, own_blocks


def index_mib() -> float:
    """Return the resident memory of an index of a million blocks on 1,024 instances, in MiB."""
    before = _resident_mib()
    _, index, own_blocks = full_index(1_024)
    # The index has its own copies of the names.
    del own_blocks
    grown = _resident_mib() - before
    assert len(index)
    return grown


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def reasoning_ended(policy: Policy) -> Callable[[int], Call]:
    """Time PASCAL's Algorithm 2 for each answering request in turn."""

    def prepare(instances: int) -> Call:
        view = cluster(instances)
        ended = [r for i in view.instances.values() for r in i.requests if r.phase is Phase.ANSWERING]
        return lambda n: policy.on_reasoning_ended(view, ended[n % len(ended)], 0.0)

    return prepare


def tick(policy: Policy) -> Callable[[int], Call]:
    """Time a tick without pools and stages, such as ARES's Algorithm 1."""

    def prepare(instances: int) -> Call:
        view = cluster(instances)
        return lambda n: policy.on_tick(view, float(n))

    return prepare


def pooled(instances: int) -> ClusterView:
    """Return a cluster of which every fourth instance prefills and the others decode."""
    view = cluster(instances)
    pools = (Pool.PREFILL, Pool.DECODE, Pool.DECODE, Pool.DECODE)
    members = zip(view.instances.items(), cycle(pools), strict=False)
    return replace(view, instances={name: replace(i, pool=pool) for (name, i), pool in members})


def prefill_done(policy: Policy) -> Callable[[int], Call]:
    """Time the dispatch to decode instances of each request of prefill instances in turn."""

    def prepare(instances: int) -> Call:
        view = pooled(instances)
        done = [r for i in view.instances.values() if i.pool is Pool.PREFILL for r in i.requests]
        return lambda n: policy.on_prefill_done(view, done[n % len(done)], 0.0)

    return prepare


def pooled_tick(policy: Policy) -> Callable[[int], Call]:
    """Time a tick while prefill instances still have 100 requests each to hand over."""

    def prepare(instances: int) -> Call:
        view = pooled(instances)
        return lambda n: policy.on_tick(view, float(n))

    return prepare


def staged(instances: int) -> ClusterView:
    """Return a cluster of four stages of equally many instances."""
    view = cluster(instances)
    names, cuts = list(view.instances), (0, 1_000, 2_000, 4_000, 131_072)
    quarter = len(names) // 4
    members = (tuple(names[first : first + quarter]) for first in range(0, 4 * quarter, quarter))
    return replace(view, stages=tuple(map(Stage, cuts[:-1], cuts[1:], members)))


def length_boundary(policy: Policy) -> Callable[[int], Call]:
    """Time the handover of each request of the first stage that has outgrown it, in turn."""

    def prepare(instances: int) -> Call:
        view = staged(instances)
        first = view.stages[0]
        held = [r for name in first.instance_ids for r in view.instances[name].requests]
        grown = [request for request in held if request.context_tokens >= first.hi]
        return lambda n: policy.on_length_boundary(view, grown[n % len(grown)], 0.0)

    return prepare


def planning(planner: Callable[[Costs, int], Plan]) -> Callable[[int], Call]:
    """Time the planning of CascadeInfer's stages for up to 128K tokens, from histograms of request
    lengths."""

    def prepare(instances: int) -> Call:
        planning, traffic = Cascade().planning, period(cluster(instances))
        edges = bucket_edges(planning.max_length)
        workload = traffic.in_flight(edges, traffic.requests)
        model, transfer_s = planning.models(())
        return lambda _: planner(Costs(workload, model, transfer_s), instances)

    return prepare


def period(view: ClusterView) -> Traffic:
    """Return traffic as if all requests had arrived in a minute, with their current lengths."""
    requests = [r for i in view.instances.values() for r in i.requests]
    return Traffic.of_history([(r.prompt_tokens, r.output_tokens) for r in requests], 60.0)


def planned_tick(policy: Cascade) -> Callable[[int], Call]:
    """Time a tick of CascadeInfer that replans, and offers all requests that are outside their stage."""

    def prepare(instances: int) -> Call:
        view = cluster(instances)
        requests = [r for i in view.instances.values() for r in i.requests]
        lengths = LengthStatistics.of(
            60.0, [r.prompt_tokens for r in requests], [(r.prompt_tokens, r.output_tokens) for r in requests]
        )
        view = replace(view, lengths=lengths)
        (planned,) = (a for a in policy.on_tick(view, policy.replan_s) if isinstance(a, SetStages))
        staged = replace(view, stages=planned.stages)
        return lambda _: policy.on_tick(staged, policy.replan_s)

    return prepare


def cases() -> list[Case]:
    """Return all cases, cheap ones first."""
    return [
        *(Case(f"place: {name}", placement(load(name))) for name in names()),
        Case("place: tailrace, prefix known", placement_with_cached_prefixes(load("tailrace"))),
        Case("cache: look up 200 blocks", lookup),
        Case("cache: store or remove 1,000 blocks", update),
        Case("place: tailrace, all reports new", placement_on_new_reports(load("tailrace"))),
        Case("reasoning ended: pascal", reasoning_ended(load("pascal"))),
        Case("reasoning ended: tailrace", reasoning_ended(load("tailrace"))),
        Case("tick: ares rescheduling=current_load", tick(load("ares rescheduling=current_load"))),
        Case("tick: ares", tick(load("ares"))),
        Case("prefill done: ares", prefill_done(load("ares"))),
        Case("prefill done: arrow", prefill_done(load("arrow"))),
        Case("length boundary: cascade", length_boundary(load("cascade"))),
        Case("tick: arrow", pooled_tick(load("arrow"))),
        Case("plan: cascade, heuristic", planning(heuristic)),
        Case("plan: cascade, exact", planning(exact)),
        Case("tick: cascade, replanning", planned_tick(Cascade()), SIZES[:3]),
        Case("tick: tailrace", tick(load("tailrace"))),
    ]


def measure(case: Case, instances: int, seconds: float) -> Cost:
    """Call a decision for so many seconds, at least 20 times, after a few warm-up calls."""
    call = case.prepare(instances)
    for n in range(5):
        call(n)
    cpu_times: list[float] = []
    wall_times: list[float] = []
    until_s = time.perf_counter() + seconds
    while len(cpu_times) < 20 or time.perf_counter() < until_s:
        began_s, began_cpu_s = time.perf_counter(), time.thread_time()
        call(len(cpu_times))
        cpu_times.append((time.thread_time() - began_cpu_s) * 1e6)
        wall_times.append((time.perf_counter() - began_s) * 1e6)
    return Cost(
        decision=case.name,
        instances=instances,
        calls=len(cpu_times),
        p50_us=percentile(cpu_times, 0.5),
        p99_us=percentile(cpu_times, 0.99),
        wall_p50_us=percentile(wall_times, 0.5),
        wall_p99_us=percentile(wall_times, 0.99),
    )


def growth(costs: Sequence[Cost]) -> float | None:
    """Return the exponent of the least-squares fit of log P50 to log instances; None for a single size."""
    if len({cost.instances for cost in costs}) < 2:
        return None
    x = [math.log(cost.instances) for cost in costs]
    y = [math.log(cost.p50_us) for cost in costs]
    return statistics.linear_regression(x, y).slope


def table(rows: dict[str, list[Cost]]) -> Table:
    """Return P50 and P99 by size, and the growth."""
    result = Table(
        title="CPU time of the scheduler's thread per decision in microseconds, P50 / P99",
        caption=f"{REQUESTS_PER_INSTANCE} requests per instance",
    )
    result.add_column("decision", no_wrap=True)
    for size in SIZES:
        result.add_column(f"{size:,}", justify="right")
    result.add_column("growth", justify="right")
    for name, costs in rows.items():
        at = {cost.instances: f"{cost.p50_us:,.0f} / {cost.p99_us:,.0f}" for cost in costs}
        exponent = growth(costs)
        shown = "" if exponent is None else f"n^{exponent:.2f}"
        result.add_row(name, *(at.get(size, "") for size in SIZES), shown)
    return result


def run(selected: Sequence[Case], seconds: float, console: Console) -> dict[str, list[Cost]]:
    """Time all selected cases."""
    rows: dict[str, list[Cost]] = {}
    with Progress(console=console) as progress:
        task = progress.add_task("deciding", total=sum(len(case.sizes) for case in selected))
        for case in selected:
            for size in case.sizes:
                rows.setdefault(case.name, []).append(measure(case, size, seconds))
                progress.advance(task)
    return rows


def main(arguments: Sequence[str] | None = None) -> Path:
    """Run the benchmark; return the path of the figures."""
    parser = argparse.ArgumentParser(prog="make bench-decisions", description=__doc__)
    parser.add_argument("--only", default="", help="decisions whose name contains this")
    parser.add_argument("--seconds", type=float, default=0.5, help="duration per decision and cluster")
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    options = parser.parse_args(arguments)
    console = Console(stderr=True)
    selected = [case for case in cases() if options.only in case.name]
    # First, because memory freed by later cases would hide it.
    memory_mib = index_mib() if any(case.name.startswith("cache:") for case in selected) else None
    rows = run(selected, options.seconds, console)
    figures: dict[str, object] = {
        "requests_per_instance": REQUESTS_PER_INSTANCE,
        "cache_index_mib": memory_mib,
        "costs": [asdict(cost) for costs in rows.values() for cost in costs],
        "growth": {name: growth(costs) for name, costs in rows.items()},
    }
    path = save("decisions", figures)
    if options.output == "json":
        print_json("decisions", figures)
    else:
        table_console(120).print(table(rows))
        if memory_mib is not None:
            print(f"index of a million blocks on 1,024 instances: {memory_mib:.0f} MiB")
    console.print(f"saved to {path}")
    return path


if __name__ == "__main__":
    main()
