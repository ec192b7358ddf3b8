"""`make bench-overload`: how overload by one tenant, or by all, affects the requests that are served.

Two simulated engines, slowed down so that they and not this machine are the bottleneck, behind vLLM's Python
API server with tenant keys; requests arrive at random (Poisson), in an open loop.

1. One tenant sends at half of the engines' capacity, while another sends nothing, as much as its limit allows
   (evenly spaced, all admitted), or ten times as much (at random, with five seconds' worth saved up). The
   cases alternate, with the same arrivals of the first tenant. Reported are its TTFT, the ratio of its P99 to
   that of the second case, which is what a tenant within its limit costs others, and the CPU time of a
   refusal.
2. The same tenant while another without a limit sends sixty prompts at once, behind a front end without
   `--fair-backlog` and behind one with it.
3. The total load is three times the engines' capacity, with and without `tailrace set slo admit=`; reported
   are the TTFT of admitted requests and how soon the others were refused.

4. A tenant sends small requests, while another sends the largest of one kind, as often as it is allowed to
   (benchmarks/overload_largest.py). The engines are fast, so that only the front end counts. Reported are the
   ratio of the first one's P99 TTFT to that with nobody else, and the API server's largest resident memory.

The first part takes seven minutes, the fourth five, all of them sixteen (`--turns 3 --burst-turns 1`: ten).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.overload_largest import LargeClient, Sent, kinds_named
from tailrace.local.ports import free_ports
from tailrace.profiles import load_profile
from tests.harness.loadgen import StreamResult, completion_request, percentile, run_stream, run_streams
from tests.harness.report import machine, save
from tests.harness.servers import MODEL, TailraceCluster, wait_until_up
from tests.harness.usage import cpu_seconds, descendants, resident_bytes
from worker_agent.engine.simulated.settings import at_speed

PROFILE, SPEED, WORKERS = "llama-3.1-8b-h100", 0.2, 2
PROMPT_TOKENS, OUTPUT_TOKENS = 1_000, 16  # one character is one token
# Requests per minute, and seconds' worth of them saved up, of the tenant beyond its limit.
LIMIT_PER_MINUTE, BURST_S = 60, 5
# Resampled sets of turns with which the interval of a ratio is estimated.
_RESAMPLED = 2_000
# Refused requests with which their CPU time is measured.
_REFUSALS = 500
TTFT_SLO_S = 2.0
# Prompts that one tenant sends at once.
BURST = 60
# Two prompts for each instance.
FAIR_BACKLOG_TOKENS = 2 * PROMPT_TOKENS
# Of the fourth part: the engines' speed, and the requests of the tenant that sends small ones.
FAST, SMALL_TOKENS, SMALL_PER_S = 20.0, 100, 12.0
# Requests with which capacity is measured.
_CAPACITY_REQUESTS = 150


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """Results of the requests of one case. Times in seconds; `refused`: answered with 429."""

    case: str
    rate_per_s: float
    sent: int
    admitted: int
    refused: int
    failed: int
    ttft_p50_s: float
    ttft_p99_s: float
    refused_p99_s: float

    @staticmethod
    def of(case: str, rate_per_s: float, results: Sequence[StreamResult]) -> LoadFigures:
        """Aggregate the results of a case."""
        admitted = [r for r in results if r.status == 200 and not r.error]
        refused = [r for r in results if r.status == 429]
        return LoadFigures(
            case,
            rate_per_s,
            len(results),
            len(admitted),
            len(refused),
            len(results) - len(admitted) - len(refused),
            percentile([r.ttft for r in admitted], 0.5),
            percentile([r.ttft for r in admitted], 0.99),
            percentile([r.finished - r.started for r in refused], 0.99),
        )


class FrontEndClient:
    """A front end with API keys, and a client with a key of each tenant."""

    def __init__(self, url: str, pid: int, keys: Mapping[str, str]) -> None:
        self.url = url
        self._pid = pid
        self._keys = keys
        self._sent = 0

    def request(self, tenant: str, tokens: int = PROMPT_TOKENS) -> bytes:
        """Return a request of a tenant, with a prompt that has not been sent before."""
        self._sent += 1
        prompt = f"{self._sent} ".ljust(tokens, "x")
        headers = {"Authorization": f"Bearer {self._keys[tenant]}"}
        return completion_request(self.url, MODEL, prompt, OUTPUT_TOKENS, headers=headers)

    def large_client(self, tenant: str) -> LargeClient:
        """Start a client that sends large requests."""
        return LargeClient(self.url, self._keys[tenant])

    def resident_mib(self) -> float:
        """Return the resident memory of the front end and its API server."""
        return sum(map(resident_bytes, descendants(self._pid))) / (1 << 20)

    async def send(
        self, tenant: str, times_s: Iterable[float], tokens: int = PROMPT_TOKENS
    ) -> list[StreamResult]:
        """Send a request at each of these times from now; return their results once the last has ended."""
        began_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            tasks = []
            for at_s in times_s:
                await asyncio.sleep(max(0.0, began_s + at_s - time.perf_counter()))
                tasks.append(group.create_task(run_stream(self.url, self.request(tenant, tokens), 120)))
        return [task.result() for task in tasks]

    async def refusal_cpu_s(self, tenant: str) -> float:
        """Send requests one after the other beyond the tenant's limit; return the CPU seconds of the front
        end and its API server for each that is refused."""
        pids = descendants(self._pid)
        began_s, refused = cpu_seconds(pids), 0
        while refused < _REFUSALS:
            before_s = cpu_seconds(pids)
            if (await run_stream(self.url, self.request(tenant), 120)).status == 429:
                refused += 1
            else:
                # What an admitted request costs does not count.
                began_s += cpu_seconds(pids) - before_s
        return (cpu_seconds(pids) - began_s) / refused


def at_random(rate_per_s: float, seconds: float, seed: int) -> Iterator[float]:
    """Yield the times of a Poisson process, in seconds."""
    rng, at_s = random.Random(seed), 0.0
    while (at_s := at_s + rng.expovariate(rate_per_s)) < seconds:
        yield at_s


def evenly(rate_per_s: float, seconds: float) -> Iterator[float]:
    """Yield evenly spaced times, in seconds."""
    for number in range(int(rate_per_s * seconds)):
        yield (number + 0.5) / rate_per_s


@dataclass(frozen=True, slots=True)
class Ratio:
    """P99 TTFT of a case divided by that of another, over all turns, with the interval that contains 90% of
    the ratios of resampled sets of turns, and the smallest and largest ratio of a single turn."""

    case: str
    base: str
    ratio: float
    low: float
    high: float
    turn_min: float
    turn_max: float

    @staticmethod
    def of(case: str, base: str, turns: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Ratio:
        """Compute it from the TTFTs of both cases in each turn, in seconds."""
        rng = random.Random(0)
        resampled = sorted(_p99_ratio(rng.choices(turns, k=len(turns))) for _ in range(_RESAMPLED))
        single = [_p99_ratio([turn]) for turn in turns]
        low, high = percentile(resampled, 0.05), percentile(resampled, 0.95)
        return Ratio(case, base, _p99_ratio(turns), low, high, min(single), max(single))

    def __str__(self) -> str:
        return (
            f"P99 TTFT, {self.case} / {self.base}: {self.ratio:.2f} "
            f"({self.low:.2f} to {self.high:.2f} in 90% of resampled sets of turns; "
            f"single turns {self.turn_min:.2f} to {self.turn_max:.2f})"
        )


def _p99_ratio(turns: Sequence[tuple[Sequence[float], Sequence[float]]]) -> float:
    case, base = ([ttft for turn in turns for ttft in turn[which]] for which in (0, 1))
    return percentile(case, 0.99) / percentile(base, 0.99)


def _ttfts(results: Sequence[StreamResult]) -> list[float]:
    return [result.ttft for result in results if result.status == 200 and not result.error]


def make_keys(file: Path) -> dict[str, str]:
    """Make a key for each tenant; return them by tenant."""
    limits = ("--requests-per-minute", str(LIMIT_PER_MINUTE), "--burst-seconds", str(BURST_S))
    return {
        "patient": _make_key(file, "patient"),
        "greedy": _make_key(file, "greedy", *limits),
        "bursty": _make_key(file, "bursty"),
    }


@contextmanager
def run_front_end(
    cluster: TailraceCluster, folder: Path, file: Path, keys: Mapping[str, str], *options: str
) -> Iterator[FrontEndClient]:
    """Run another front end of the cluster for the block, with the keys of `file` and further options."""
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "tailrace", "serve", "frontend", "--etcd", cluster.etcd]
    command += ["--http", f"127.0.0.1:{port}", "--served-model-name", MODEL, "--api-keys", str(file)]
    command += options
    with (folder / f"frontend-{port}.log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            if not wait_until_up(f"{url}/health", process, 180):
                raise RuntimeError("the front end did not start")
            yield FrontEndClient(url, process.pid, keys)
        finally:
            process.terminate()
            process.wait(timeout=60)


def _make_key(file: Path, tenant: str, *limits: str) -> str:
    command = [sys.executable, "-m", "tailrace", "keys", "make", tenant, "--file", str(file), *limits]
    completed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    return completed.stdout.split()[-1]


def write_profile(folder: Path, speed: float) -> Path:
    """Write the profile of engines at another speed to a file; return its path."""
    profile = msgspec.structs.replace(at_speed(load_profile(PROFILE), speed), name=f"at-{speed:g}")
    path = folder / f"{profile.name}.json"
    path.write_bytes(msgspec.json.encode(profile))
    return path


async def measure_capacity(front_end: FrontEndClient) -> float:
    """Return how many requests per second the engines finish under saturation."""
    requests = [front_end.request("patient") for _ in range(_CAPACITY_REQUESTS)]
    results = await run_streams(front_end.url, requests)
    if failed := [r.error for r in results if r.error]:
        raise RuntimeError(f"{len(failed)} of {_CAPACITY_REQUESTS} requests failed: {failed[0]}")
    return _CAPACITY_REQUESTS / (max(r.finished for r in results) - min(r.started for r in results))


@dataclass(frozen=True, slots=True)
class Isolation:
    """The first part's figures: of the tenant within its limit, of the other one, and how they compare."""

    own: list[LoadFigures]
    other: list[LoadFigures]
    ratios: list[Ratio]
    refusal_cpu_ms: float


async def beside_another_tenant(
    front_end: FrontEndClient, capacity: float, seconds: float, turns: int, factor: float, console: Console
) -> Isolation:
    """Run the first part."""
    limit = LIMIT_PER_MINUTE / 60
    alone, within, beyond = "alone", "beside one at its limit", f"beside one at {factor:g} times its limit"
    own: dict[str, list[list[StreamResult]]] = {case: [] for case in (alone, within, beyond)}
    other: dict[str, list[StreamResult]] = {case: [] for case in (within, beyond)}
    for turn in range(turns):
        for case in own:
            console.print(f"  turn {turn + 1}: {case}", style="dim")
            times = {
                alone: iter(()),
                within: evenly(limit, seconds),
                beyond: at_random(factor * limit, seconds, 1_000 + turn),
            }[case]
            async with asyncio.TaskGroup() as group:
                patient = group.create_task(front_end.send("patient", at_random(capacity / 2, seconds, turn)))
                greedy = group.create_task(front_end.send("greedy", times))
            own[case].append(patient.result())
            if case in other:
                other[case] += greedy.result()
    ttfts = {case: [_ttfts(results) for results in by_turn] for case, by_turn in own.items()}
    return Isolation(
        [
            LoadFigures.of(case, capacity / 2, [result for results in by_turn for result in results])
            for case, by_turn in own.items()
        ],
        [
            LoadFigures.of(case, rate, results)
            for (case, results), rate in zip(other.items(), (limit, factor * limit), strict=True)
        ],
        [
            Ratio.of(case, base, list(zip(ttfts[case], ttfts[base], strict=True)))
            for case, base in ((beyond, within), (beyond, alone), (within, alone))
        ],
        1_000 * await front_end.refusal_cpu_s("greedy"),
    )


async def beside_a_burst(
    front_end: FrontEndClient,
    fair_front: FrontEndClient,
    capacity: float,
    seconds: float,
    turns: int,
    console: Console,
) -> list[LoadFigures]:
    """Run the second part."""
    results_by_case: dict[str, list[StreamResult]] = {}
    for turn in range(turns):
        for case, front, prompts in (
            ("alone", front_end, 0),
            (f"beside {BURST} prompts at once", front_end, BURST),
            (f"the same, --fair-backlog {FAIR_BACKLOG_TOKENS}", fair_front, BURST),
        ):
            console.print(f"  turn {turn + 1}: {case}", style="dim")
            async with asyncio.TaskGroup() as group:
                patient = group.create_task(front.send("patient", at_random(capacity / 2, seconds, turn)))
                await asyncio.sleep(seconds / 4)
                for _ in range(prompts):
                    group.create_task(run_stream(front.url, front.request("bursty"), 120))
            results_by_case.setdefault(case, []).extend(patient.result())
    return [LoadFigures.of(case, capacity / 2, results) for case, results in results_by_case.items()]


@dataclass(frozen=True, slots=True)
class LargeFigures:
    """The fourth part's figures for one kind: its size, answers by status, and what they cost the other."""

    kind: str
    size: int
    unit: str
    statuses: dict[int, int]
    failed: int
    alone_p99_s: float
    p99_s: float
    ratio: Ratio
    resident_mib: float


async def beside_large_requests(
    front_end: FrontEndClient, names: Sequence[str], seconds: float, turns: int, console: Console
) -> list[LargeFigures]:
    """Run the fourth part with the kinds whose names contain one of `names`."""
    kinds, client = kinds_named(names), front_end.large_client("bursty")
    ttfts: dict[str, list[list[float]]] = {}
    sent: dict[str, Sent] = {}
    failed: dict[str, int]
    resident, failed = dict.fromkeys((kind.name for kind in kinds), 0.0), {}
    try:
        sizes = {kind.name: await client.largest(kind) for kind in kinds}
        for turn in range(turns):
            for kind in (None, *kinds):
                case = "" if kind is None else kind.name
                console.print(f"  turn {turn + 1}: {case or 'alone'}", style="dim")
                async with asyncio.TaskGroup() as group:
                    small = group.create_task(
                        front_end.send("patient", at_random(SMALL_PER_S, seconds, turn), SMALL_TOKENS)
                    )
                    if kind is not None:
                        attack = group.create_task(client.attack(kind, sizes[case], seconds))
                        while not attack.done():
                            resident[case] = max(resident[case], front_end.resident_mib())
                            await asyncio.wait([attack], timeout=0.5)
                        one = attack.result()
                        known = sent.setdefault(case, Sent(one.size))
                        for status, count in one.statuses.items():
                            known.statuses[status] = known.statuses.get(status, 0) + count
                results = small.result()
                ttfts.setdefault(case, []).append([result.ttft for result in results])
                failed[case] = failed.get(case, 0) + len(results) - len(_ttfts(results))
                # Wait until the front end is done with what it still has of it.
                await front_end.send("patient", [2.0, 2.1, 2.2], SMALL_TOKENS)
    finally:
        client.close()
    return [
        LargeFigures(
            kind.name,
            sizes[kind.name],
            kind.unit,
            sent[kind.name].statuses,
            failed[kind.name],
            percentile([ttft for turn in ttfts[""] for ttft in turn], 0.99),
            percentile([ttft for turn in ttfts[kind.name] for ttft in turn], 0.99),
            Ratio.of(kind.name, "alone", list(zip(ttfts[kind.name], ttfts[""], strict=True))),
            resident[kind.name],
        )
        for kind in kinds
    ]


async def overload_all(
    front_end: FrontEndClient,
    cluster: TailraceCluster,
    capacity: float,
    seconds: float,
    admit: float,
    console: Console,
) -> list[LoadFigures]:
    """Run the third part."""
    loads = []
    for case, rate, factor in (
        ("half of capacity", 0.5 * capacity, 0.0),
        ("three times capacity, everybody admitted", 3 * capacity, 0.0),
        (f"three times capacity, admit={admit:g}", 3 * capacity, admit),
    ):
        console.print(f"  {case}", style="dim")
        await asyncio.to_thread(_set_slo, cluster.admin, factor)
        loads.append(LoadFigures.of(case, rate, await front_end.send("patient", at_random(rate, seconds, 7))))
    return loads


def _set_slo(admin: str, admit: float) -> None:
    command = [sys.executable, "-m", "tailrace", "set", "slo", f"ttft={TTFT_SLO_S}", f"admit={admit}"]
    environment = {**os.environ, "TAILRACE_ADMIN": admin}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment, timeout=60)


def main() -> int:
    """Run all parts; the exit status is 1 if a request failed otherwise than by a refusal."""
    parser = argparse.ArgumentParser(
        prog="make bench-overload", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default="1,2,3,4", help="comma-separated list; default: all")
    parser.add_argument("--seconds", type=float, default=20.0, help="duration of arrivals per case and turn")
    parser.add_argument("--turns", type=int, default=6, help="repetitions of the first part")
    parser.add_argument(
        "--factor", type=float, default=10.0, help="multiple of its limit that a tenant sends"
    )
    parser.add_argument("--burst-turns", type=int, default=2, help="repetitions of the second part")
    parser.add_argument("--admit", type=float, default=0.25, help="admission factor of the third part")
    parser.add_argument("--large-turns", type=int, default=3, help="repetitions of the fourth part")
    parser.add_argument("--large-seconds", type=float, default=8.0, help="the same per case and turn")
    parser.add_argument(
        "--large", default="", metavar="NAME,..", help="kinds of the fourth part, by a part of their names"
    )
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    options = parser.parse_args()
    parts = set(options.parts.split(","))
    if not parts <= {"1", "2", "3", "4"}:
        parser.error("--parts takes 1, 2, 3 and 4, separated by commas")
    console = Console(stderr=options.output == "json", width=130)
    console.print(f"on {machine()}")
    isolation: Isolation | None = None
    bursts: list[LoadFigures] = []
    overload: list[LoadFigures] = []
    large: list[LargeFigures] = []
    capacity = 0.0
    if "4" in parts:
        with tempfile.TemporaryDirectory(prefix="tailrace-overload-") as name, ExitStack() as stack:
            folder = Path(name)
            console.print("starting fast engines", style="dim")
            file = folder / "keys.json"
            keys = make_keys(file)
            cluster = stack.enter_context(start_cluster(folder, FAST))
            front = stack.enter_context(run_front_end(cluster, folder, file, keys))
            asyncio.run(front.send("patient", at_random(2.0, 5.0, 99), SMALL_TOKENS))  # warm up
            names = [kind for kind in options.large.split(",") if kind]
            large = asyncio.run(
                beside_large_requests(front, names, options.large_seconds, options.large_turns, console)
            )
    with tempfile.TemporaryDirectory(prefix="tailrace-overload-") as name, ExitStack() as stack:
        if parts == {"4"}:
            return report(isolation, bursts, overload, large, capacity, options.output, console)
        folder = Path(name)
        console.print("starting", style="dim")
        file = folder / "keys.json"
        keys = make_keys(file)
        cluster = stack.enter_context(start_cluster(folder, SPEED))
        front = stack.enter_context(run_front_end(cluster, folder, file, keys))
        asyncio.run(front.send("patient", at_random(2.0, 5.0, 99)))  # warm up
        capacity = asyncio.run(measure_capacity(front))
        console.print(f"capacity: {capacity:.1f} requests/s", style="dim")
        if "1" in parts:
            isolation = asyncio.run(
                beside_another_tenant(
                    front, capacity, options.seconds, options.turns, options.factor, console
                )
            )
        if "2" in parts:
            fair_front = stack.enter_context(
                run_front_end(cluster, folder, file, keys, "--fair-backlog", str(FAIR_BACKLOG_TOKENS))
            )
            bursts = asyncio.run(
                beside_a_burst(front, fair_front, capacity, options.seconds, options.burst_turns, console)
            )
        if "3" in parts:
            overload = asyncio.run(
                overload_all(front, cluster, capacity, options.seconds, options.admit, console)
            )
    return report(isolation, bursts, overload, large, capacity, options.output, console)


def start_cluster(folder: Path, speed: float) -> TailraceCluster:
    """Start a cluster with engines of this speed."""
    profile = str(write_profile(folder, speed))
    arguments = ["--engine", "simulated", "--workers", str(WORKERS), "--policy", "least_loaded"]
    arguments += ["--no-traces", "--", "--profile", profile, "--engine-arg", f"profile={profile}"]
    return TailraceCluster("tailrace", arguments)


def report(
    isolation: Isolation | None,
    bursts: Sequence[LoadFigures],
    overload: Sequence[LoadFigures],
    large: Sequence[LargeFigures],
    capacity: float,
    output: str,
    console: Console,
) -> int:
    """Print and save the figures; return the exit status."""
    if isolation is not None:
        _print("one tenant at half of capacity, and another one", isolation.own, console)
        _print("the other one", isolation.other, console)
        for ratio in isolation.ratios:
            console.print(str(ratio))
        console.print(f"CPU time of a refusal: {isolation.refusal_cpu_ms:.2f} ms")
    if bursts:
        _print("one tenant at half of capacity, and a burst of another", bursts, console)
    if overload:
        _print("all tenants", overload, console)
    if large:
        _print_large(large, console)
    figures: dict[str, object] = {
        "capacity_per_s": capacity,
        "tenants": None if isolation is None else asdict(isolation),
        "bursts": [asdict(load) for load in bursts],
        "overload": [asdict(load) for load in overload],
        "large": [asdict(one) for one in large],
    }
    path = save("overload", figures)
    if output == "json":
        print(json.dumps(figures))
    console.print(f"figures: {path}")
    tenants = [] if isolation is None else [*isolation.own, *isolation.other]
    failed = [load.failed for load in (*tenants, *bursts, *overload)] + [one.failed for one in large]
    return 1 if any(failed) else 0


def _print_large(large: Sequence[LargeFigures], console: Console) -> None:
    title = f"P99 TTFT of small requests beside large ones (alone: {large[0].alone_p99_s * 1e3:.0f} ms)"
    table = Table("kind", "largest allowed", "answers", title=title)
    for column in ("P99 ms", "ratio", "90% of resampled", "turns", "failed", "resident MiB"):
        table.add_column(column, justify="right")
    for one in large:
        ratio = one.ratio
        table.add_row(
            one.kind,
            f"{one.size:,} {one.unit}",
            ", ".join(f"{count} x {status or 'none'}" for status, count in sorted(one.statuses.items())),
            f"{one.p99_s * 1e3:.0f}",
            f"{ratio.ratio:.2f}",
            f"{ratio.low:.2f}-{ratio.high:.2f}",
            f"{ratio.turn_min:.2f}-{ratio.turn_max:.2f}",
            str(one.failed),
            f"{one.resident_mib:,.0f}",
        )
    console.print(table)


def _print(title: str, loads: Sequence[LoadFigures], console: Console) -> None:
    table = Table(title=title)
    columns = ("offered/s", "admitted", "refused", "failed", "TTFT P50 s", "P99 s", "relative", "429 P99 s")
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    for load in loads:
        table.add_row(
            load.case,
            f"{load.rate_per_s:.1f}",
            str(load.admitted),
            str(load.refused),
            str(load.failed),
            f"{load.ttft_p50_s:.3f}",
            f"{load.ttft_p99_s:.3f}",
            f"{load.ttft_p99_s / loads[0].ttft_p99_s:.2f}",
            f"{load.refused_p99_s:.3f}" if load.refused else "",
        )
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
