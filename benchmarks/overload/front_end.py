"""Clusters with front ends that require tenants' keys, and their clients."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from benchmarks.overload.largest import LargeClient
from tailrace.local.ports import free_ports
from tailrace.profiles import load_profile
from tests.harness.loadgen import StreamResult, completion_request, run_stream, run_streams
from tests.harness.servers import MODEL, TailraceCluster, wait_until_up
from tests.harness.usage import cpu_seconds, descendants, resident_bytes
from worker_agent.engine.simulated.settings import at_speed

PROFILE, SPEED, WORKERS = "llama-3.1-8b-h100", 0.2, 2
PROMPT_TOKENS, OUTPUT_TOKENS = 1_000, 16  # one character is one token
# Two prompts for each instance.
FAIR_BACKLOG_TOKENS = 2 * PROMPT_TOKENS
# Requests per minute, and seconds' worth of them saved up, of the tenant beyond its limit.
LIMIT_PER_MINUTE, BURST_S = 60, 5
# Refused requests with which their CPU time is measured.
_REFUSALS = 500
# Requests with which capacity is measured.
_CAPACITY_REQUESTS = 150


class FrontEndClient:
    """A front end with API keys, and a client with a key of each tenant."""

    def __init__(self, url: str, pid: int, keys: Mapping[str, str]) -> None:
        self.url = url
        self.pid = pid
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
        return sum(map(resident_bytes, descendants(self.pid))) / (1 << 20)

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
        pids = descendants(self.pid)
        began_s, refused = cpu_seconds(pids), 0
        while refused < _REFUSALS:
            before_s = cpu_seconds(pids)
            if (await run_stream(self.url, self.request(tenant), 120)).status == 429:
                refused += 1
            else:
                # What an admitted request costs does not count.
                began_s += cpu_seconds(pids) - before_s
        return (cpu_seconds(pids) - began_s) / refused


def make_keys(file: Path, large_per_minute: float = 0.0) -> dict[str, str]:
    """Make a key for each tenant; return them by tenant.

    `large_per_minute`: limit of the tenant `large`; 0: none.
    """
    return {
        "patient": _make_key(file, "patient"),
        "greedy": _make_key(file, "greedy", *_limits(LIMIT_PER_MINUTE)),
        "bursty": _make_key(file, "bursty"),
        "large": _make_key(file, "large", *(_limits(large_per_minute) if large_per_minute else ())),
    }


def _limits(per_minute: float) -> tuple[str, ...]:
    return ("--requests-per-minute", str(per_minute), "--burst-seconds", str(BURST_S))


@contextmanager
def run_front_end(
    cluster: TailraceCluster, folder: Path, file: Path, keys: Mapping[str, str], *options: str
) -> Iterator[FrontEndClient]:
    """Run another front end of the cluster for the block, with the keys of `file` and further options."""
    with _serving(cluster, folder, "frontend", file, "/health", "--served-model-name", MODEL, *options) as (
        url,
        pid,
    ):
        yield FrontEndClient(url, pid, keys)


@contextmanager
def run_behind_edge(
    cluster: TailraceCluster, folder: Path, file: Path, keys: Mapping[str, str]
) -> Iterator[FrontEndClient]:
    """Run another front end of the cluster with vllm-rs, and an edge with the keys of `file` before it."""
    with (
        run_front_end(cluster, folder, file, keys, "--front", "rust") as front,
        _serving(cluster, folder, "edge", file, "/ready") as (url, _),
    ):
        yield FrontEndClient(url, front.pid, keys)


@contextmanager
def _serving(
    cluster: TailraceCluster, folder: Path, kind: str, file: Path, up: str, *options: str
) -> Iterator[tuple[str, int]]:
    """Run a service for users for the block, once its path `up` answers; yield its URL and process ID."""
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "tailrace", "serve", kind, "--etcd", cluster.etcd]
    command += ["--http", f"127.0.0.1:{port}", "--api-keys", str(file), *options]
    with (folder / f"{kind}-{port}.log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            if not wait_until_up(f"{url}{up}", process, 180):
                raise RuntimeError(f"the {kind} did not start")
            yield url, process.pid
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


def start_cluster(folder: Path, speed: float) -> TailraceCluster:
    """Start a cluster with engines of this speed."""
    profile = str(write_profile(folder, speed))
    arguments = ["--engine", "simulated", "--workers", str(WORKERS), "--policy", "least_loaded"]
    arguments += ["--no-traces", "--profile", profile]
    return TailraceCluster("tailrace", arguments)


async def measure_capacity(front_end: FrontEndClient) -> float:
    """Return how many requests per second the engines finish under saturation."""
    requests = [front_end.request("patient") for _ in range(_CAPACITY_REQUESTS)]
    results = await run_streams(front_end.url, requests)
    if failed := [r.error for r in results if r.error]:
        raise RuntimeError(f"{len(failed)} of {_CAPACITY_REQUESTS} requests failed: {failed[0]}")
    return _CAPACITY_REQUESTS / (max(r.finished for r in results) - min(r.started for r in results))
