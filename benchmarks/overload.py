"""`make bench-overload`: what overload by one tenant, and by all, does to those who are served.

Two simulated engines, slowed so that they and not this machine are what is short, behind vLLM's Python API
server with keys of tenants; requests come at random (Poisson), at a rate that does not wait for answers.

1. One tenant sends at half of what the engines can serve, beside another that sends nothing, as much as its
   limit allows, and ten times as much; reported is the first one's TTFT. The cases take turns.
2. The same tenant beside one without a limit that sends sixty prompts at once, behind a front end without
   `--fair-backlog` and behind one with it.
3. Everybody sends three times what the engines can serve, with and without `tailrace set slo admit=`;
   reported are the TTFT of admitted requests and how soon the others were refused.
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
from benchmarks.servers import MODEL, TailraceCluster, answers
from tailrace.local.ports import free_ports
from tailrace.profiles import load_profile
from worker_agent.engine.simulated.settings import at_speed

PROFILE, SPEED, WORKERS = "llama-3.1-8b-h100", 0.2, 2
PROMPT_TOKENS, OUTPUT_TOKENS = 1_000, 16  # a letter is a token
# A minute, of the tenant that asks for ten times as much.
LIMIT_PER_MINUTE = 60
TTFT_SLO_S = 2.0
# Prompts of the tenant that sends all of them at once.
BURST = 60
# Two prompts for each instance.
FAIR_BACKLOG_TOKENS = 2 * PROMPT_TOKENS
# To measure what the engines can serve.
_AT_ONCE = 150


@dataclass(frozen=True, slots=True)
class Load:
    """What came of one stretch of requests. Times in seconds; refused: those that were answered with 429."""

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
    def of(case: str, rate_per_s: float, results: Sequence[StreamResult]) -> Load:
        """Count."""
        admitted = [r for r in results if r.status == 200 and not r.error]
        refused = [r for r in results if r.status == 429]
        return Load(
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


class Door:
    """A front end with keys, and the keys."""

    def __init__(self, url: str, keys: Mapping[str, str]) -> None:
        self.url = url
        self._keys = keys
        self._sent = 0

    def request(self, tenant: str) -> bytes:
        """A request of that tenant, with a prompt that nobody has sent before."""
        self._sent += 1
        prompt = f"{self._sent} ".ljust(PROMPT_TOKENS, "x")
        headers = {"Authorization": f"Bearer {self._keys[tenant]}"}
        return completion_request(self.url, MODEL, prompt, OUTPUT_TOKENS, headers=headers)

    async def arrivals(self, tenant: str, rate_per_s: float, seconds: float, seed: int) -> list[StreamResult]:
        """Send at random for so long; what came of all, once the last has ended."""
        draw = random.Random(seed)
        began_s, at_s = time.perf_counter(), 0.0
        async with asyncio.TaskGroup() as group:
            tasks = []
            while (at_s := at_s + draw.expovariate(rate_per_s)) < seconds:
                await asyncio.sleep(max(0.0, began_s + at_s - time.perf_counter()))
                tasks.append(group.create_task(run_stream(self.url, self.request(tenant), 120)))
        return [task.result() for task in tasks]

    async def saturate(self, tenant: str) -> None:
        """Take what the tenant may take at once: from then on it has what its minute gives."""
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
def door(
    cluster: TailraceCluster, folder: Path, file: Path, keys: Mapping[str, str], *options: str
) -> Iterator[Door]:
    """Run a further front end of the cluster, with the keys of `file` and its own options."""
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "tailrace", "serve", "frontend", "--etcd", cluster.etcd]
    command += ["--http", f"127.0.0.1:{port}", "--served-model-name", MODEL, "--api-keys", str(file)]
    command += options
    with (folder / f"frontend-{port}.log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            if not answers(f"{url}/health", process, 180):
                raise RuntimeError("the front end did not come up")
            yield Door(url, keys)
        finally:
            process.terminate()
            process.wait(timeout=60)


def _make_key(file: Path, tenant: str, *limits: str) -> str:
    command = [sys.executable, "-m", "tailrace", "keys", "make", tenant, "--file", str(file), *limits]
    made = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    return made.stdout.split()[-1]


def slow_profile(folder: Path) -> Path:
    """The engines' step times, as a file."""
    profile = msgspec.structs.replace(at_speed(load_profile(PROFILE), SPEED), name="slow")
    path = folder / "slow.json"
    path.write_bytes(msgspec.json.encode(profile))
    return path


async def measure_capacity(door: Door) -> float:
    """Requests a second that the engines end when there are always more."""
    requests = [door.request("patient") for _ in range(_AT_ONCE)]
    results = await run_streams(door.url, requests)
    if failed := [r.error for r in results if r.error]:
        raise RuntimeError(f"{len(failed)} of {_AT_ONCE} requests failed: {failed[0]}")
    return _AT_ONCE / (max(r.finished for r in results) - min(r.started for r in results))


async def one_tenant(door: Door, capacity: float, seconds: float, turns: int, console: Console) -> list[Load]:
    """The first part."""
    limit = LIMIT_PER_MINUTE / 60
    own: dict[str, list[StreamResult]] = {}
    for turn in range(turns):
        for case, rate in (
            ("alone", 0.0),
            ("beside one at its limit", limit),
            ("at ten times it", 10 * limit),
        ):
            console.print(f"  turn {turn + 1}: {case}", style="dim")
            await door.saturate("greedy")
            async with asyncio.TaskGroup() as group:
                patient = group.create_task(door.arrivals("patient", capacity / 2, seconds, turn))
                if rate:
                    group.create_task(door.arrivals("greedy", rate, seconds, 1_000 + turn))
            own.setdefault(case, []).extend(patient.result())
    return [Load.of(case, capacity / 2, results) for case, results in own.items()]


async def beside_a_burst(
    door: Door, fair: Door, capacity: float, seconds: float, turns: int, console: Console
) -> list[Load]:
    """The second part."""
    own: dict[str, list[StreamResult]] = {}
    for turn in range(turns):
        for case, front, prompts in (
            ("alone", door, 0),
            (f"beside {BURST} prompts at once", door, BURST),
            (f"the same, --fair-backlog {FAIR_BACKLOG_TOKENS}", fair, BURST),
        ):
            console.print(f"  turn {turn + 1}: {case}", style="dim")
            async with asyncio.TaskGroup() as group:
                patient = group.create_task(front.arrivals("patient", capacity / 2, seconds, turn))
                await asyncio.sleep(seconds / 4)
                for _ in range(prompts):
                    group.create_task(run_stream(front.url, front.request("bursty"), 120))
            own.setdefault(case, []).extend(patient.result())
    return [Load.of(case, capacity / 2, results) for case, results in own.items()]


async def everybody(
    door: Door, cluster: TailraceCluster, capacity: float, seconds: float, admit: float, console: Console
) -> list[Load]:
    """The third part."""
    loads = []
    for case, rate, factor in (
        ("half of capacity", 0.5 * capacity, 0.0),
        ("three times capacity, everybody admitted", 3 * capacity, 0.0),
        (f"three times capacity, admit={admit:g}", 3 * capacity, admit),
    ):
        console.print(f"  {case}", style="dim")
        await asyncio.to_thread(_set_slo, cluster.admin, factor)
        loads.append(Load.of(case, rate, await door.arrivals("patient", rate, seconds, 7)))
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
    parser.add_argument("--seconds", type=float, default=40.0, help="of arrivals, each case and turn")
    parser.add_argument("--turns", type=int, default=3, help="of the cases with two tenants")
    parser.add_argument("--admit", type=float, default=0.25, help="of the third part")
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    options = parser.parse_args()
    console = Console(stderr=options.output == "json", width=130)
    console.print(f"on {machine()}")
    with tempfile.TemporaryDirectory(prefix="tailrace-overload-") as name:
        folder = Path(name)
        console.print("starting", style="dim")
        profile = str(slow_profile(folder))
        arguments = ["--engine", "simulated", "--workers", str(WORKERS), "--policy", "least_loaded"]
        arguments += ["--no-traces", "--", "--profile", profile, "--engine-arg", f"profile={profile}"]
        file = folder / "keys.json"
        keys = make_keys(file)
        with (
            TailraceCluster("tailrace", arguments) as cluster,
            door(cluster, folder, file, keys) as front,
            door(cluster, folder, file, keys, "--fair-backlog", str(FAIR_BACKLOG_TOKENS)) as fair,
        ):
            asyncio.run(front.arrivals("patient", 2.0, 5.0, 99))  # warm up
            capacity = asyncio.run(measure_capacity(front))
            console.print(f"the engines take {capacity:.1f} requests/s", style="dim")
            tenants = asyncio.run(one_tenant(front, capacity, options.seconds, options.turns, console))
            bursts = asyncio.run(
                beside_a_burst(front, fair, capacity, options.seconds, options.turns, console)
            )
            overload = asyncio.run(
                everybody(front, cluster, capacity, options.seconds, options.admit, console)
            )
    _print("one tenant at half of capacity, and another", tenants, console)
    _print("one tenant at half of capacity, and a burst of another", bursts, console)
    _print("everybody", overload, console)
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


def _print(title: str, loads: Sequence[Load], console: Console) -> None:
    table = Table(title=title)
    columns = ("asked/s", "admitted", "refused", "failed", "TTFT P50 s", "P99 s", "of the first", "429 P99 s")
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
