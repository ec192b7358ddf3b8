"""`make bench-overload`: how overload by one tenant, or by all, affects the requests that are served.

Two simulated engines, slowed down so that they and not this machine are the bottleneck, behind vLLM's Python
API server with tenant keys; requests arrive at random (Poisson), in an open loop.

1. One tenant sends at half of the engines' capacity, while another sends nothing, as much as its limit
allows, or ten times as much; reported is the first one's TTFT. The cases alternate.
2. The same tenant while another without a limit sends sixty prompts at once, behind a front end without
   `--fair-backlog` and behind one with it.
3. The total load is three times the engines' capacity, with and without `tailrace set slo admit=`; reported
   are the TTFT of admitted requests and how soon the others were refused.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.loadgen import StreamResult, completion_request, percentile, run_stream, run_streams
from benchmarks.report import machine, save
from benchmarks.servers import MODEL, TailraceCluster, wait_until_up
from tailrace.local.ports import free_ports
from tailrace.profiles import load_profile
from worker_agent.engine.simulated.settings import at_speed

PROFILE, SPEED, WORKERS = "llama-3.1-8b-h100", 0.2, 2
PROMPT_TOKENS, OUTPUT_TOKENS = 1_000, 16  # one character is one token
# Requests per minute of the tenant that sends ten times as many.
LIMIT_PER_MINUTE = 60
TTFT_SLO_S = 2.0
# Prompts that one tenant sends at once.
BURST = 60
# Two prompts for each instance.
FAIR_BACKLOG_TOKENS = 2 * PROMPT_TOKENS
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

    def __init__(self, url: str, keys: Mapping[str, str]) -> None:
        self.url = url
        self._keys = keys
        self._sent = 0

    def request(self, tenant: str) -> bytes:
        """Return a request of a tenant, with a prompt that has not been sent before."""
        self._sent += 1
        prompt = f"{self._sent} ".ljust(PROMPT_TOKENS, "x")
        headers = {"Authorization": f"Bearer {self._keys[tenant]}"}
        return completion_request(self.url, MODEL, prompt, OUTPUT_TOKENS, headers=headers)

    async def send_at_random(
        self, tenant: str, rate_per_s: float, seconds: float, seed: int
    ) -> list[StreamResult]:
        """Send requests at random for so many seconds; return all results once the last has ended."""
        rng = random.Random(seed)
        began_s, at_s = time.perf_counter(), 0.0
        async with asyncio.TaskGroup() as group:
            tasks = []
            while (at_s := at_s + rng.expovariate(rate_per_s)) < seconds:
                await asyncio.sleep(max(0.0, began_s + at_s - time.perf_counter()))
                tasks.append(group.create_task(run_stream(self.url, self.request(tenant), 120)))
        return [task.result() for task in tasks]

    async def use_up_limit(self, tenant: str) -> None:
        """Use up what the tenant may send at once; from then on it has only its rate per minute."""
        for _ in range(10 * LIMIT_PER_MINUTE):
            if (await run_stream(self.url, self.request(tenant), 120)).status == 429:
                return
        raise RuntimeError(f"tenant {tenant} is not limited")


def make_keys(file: Path) -> dict[str, str]:
    """Make a key for each tenant; return them by tenant."""
    return {
        "patient": _make_key(file, "patient"),
        "greedy": _make_key(file, "greedy", "--requests-per-minute", str(LIMIT_PER_MINUTE)),
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
            yield FrontEndClient(url, keys)
        finally:
            process.terminate()
            process.wait(timeout=60)


def _make_key(file: Path, tenant: str, *limits: str) -> str:
    command = [sys.executable, "-m", "tailrace", "keys", "make", tenant, "--file", str(file), *limits]
    completed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    return completed.stdout.split()[-1]


def write_slow_profile(folder: Path) -> Path:
    """Write the slowed engines' profile to a file; return its path."""
    profile = msgspec.structs.replace(at_speed(load_profile(PROFILE), SPEED), name="slow")
    path = folder / "slow.json"
    path.write_bytes(msgspec.json.encode(profile))
    return path


async def measure_capacity(front_end: FrontEndClient) -> float:
    """Return how many requests per second the engines finish under saturation."""
    requests = [front_end.request("patient") for _ in range(_CAPACITY_REQUESTS)]
    results = await run_streams(front_end.url, requests)
    if failed := [r.error for r in results if r.error]:
        raise RuntimeError(f"{len(failed)} of {_CAPACITY_REQUESTS} requests failed: {failed[0]}")
    return _CAPACITY_REQUESTS / (max(r.finished for r in results) - min(r.started for r in results))


async def beside_another_tenant(
    front_end: FrontEndClient, capacity: float, seconds: float, turns: int, console: Console
) -> list[LoadFigures]:
    """Run the first part."""
    limit = LIMIT_PER_MINUTE / 60
    results_by_case: dict[str, list[StreamResult]] = {}
    for turn in range(turns):
        for case, rate in (
            ("alone", 0.0),
            ("beside one at its limit", limit),
            ("at ten times it", 10 * limit),
        ):
            console.print(f"  turn {turn + 1}: {case}", style="dim")
            await front_end.use_up_limit("greedy")
            async with asyncio.TaskGroup() as group:
                patient = group.create_task(front_end.send_at_random("patient", capacity / 2, seconds, turn))
                if rate:
                    group.create_task(front_end.send_at_random("greedy", rate, seconds, 1_000 + turn))
            results_by_case.setdefault(case, []).extend(patient.result())
    return [LoadFigures.of(case, capacity / 2, results) for case, results in results_by_case.items()]


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
                patient = group.create_task(front.send_at_random("patient", capacity / 2, seconds, turn))
                await asyncio.sleep(seconds / 4)
                for _ in range(prompts):
                    group.create_task(run_stream(front.url, front.request("bursty"), 120))
            results_by_case.setdefault(case, []).extend(patient.result())
    return [LoadFigures.of(case, capacity / 2, results) for case, results in results_by_case.items()]


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
        loads.append(LoadFigures.of(case, rate, await front_end.send_at_random("patient", rate, seconds, 7)))
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
    parser.add_argument("--seconds", type=float, default=40.0, help="duration of arrivals per case and turn")
    parser.add_argument("--turns", type=int, default=3, help="repetitions of the cases with two tenants")
    parser.add_argument("--admit", type=float, default=0.25, help="admission factor of the third part")
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    options = parser.parse_args()
    console = Console(stderr=options.output == "json", width=130)
    console.print(f"on {machine()}")
    with tempfile.TemporaryDirectory(prefix="tailrace-overload-") as name:
        folder = Path(name)
        console.print("starting", style="dim")
        profile = str(write_slow_profile(folder))
        arguments = ["--engine", "simulated", "--workers", str(WORKERS), "--policy", "least_loaded"]
        arguments += ["--no-traces", "--", "--profile", profile, "--engine-arg", f"profile={profile}"]
        file = folder / "keys.json"
        keys = make_keys(file)
        with (
            TailraceCluster("tailrace", arguments) as cluster,
            run_front_end(cluster, folder, file, keys) as front,
            run_front_end(
                cluster, folder, file, keys, "--fair-backlog", str(FAIR_BACKLOG_TOKENS)
            ) as fair_front,
        ):
            asyncio.run(front.send_at_random("patient", 2.0, 5.0, 99))  # warm up
            capacity = asyncio.run(measure_capacity(front))
            console.print(f"capacity: {capacity:.1f} requests/s", style="dim")
            tenants = asyncio.run(
                beside_another_tenant(front, capacity, options.seconds, options.turns, console)
            )
            bursts = asyncio.run(
                beside_a_burst(front, fair_front, capacity, options.seconds, options.turns, console)
            )
            overload = asyncio.run(
                overload_all(front, cluster, capacity, options.seconds, options.admit, console)
            )
    _print("one tenant at half of capacity, and another one", tenants, console)
    _print("one tenant at half of capacity, and a burst of another", bursts, console)
    _print("all tenants", overload, console)
    figures: dict[str, object] = {
        "tenants": [asdict(load) for load in tenants],
        "bursts": [asdict(load) for load in bursts],
        "overload": [asdict(load) for load in overload],
    }
    path = save("overload", figures)
    if options.output == "json":
        print(json.dumps(figures))
    console.print(f"figures: {path}")
    return 1 if any(load.failed for load in (*tenants, *bursts, *overload)) else 0


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
