"""Profile and load a real vLLM worker, simulate the same, and report the error.

Nothing is fitted to the compared load. The worker measures its own profile (`tailrace profile`) twice: alone,
and while everything that serves such a load is active, with a simulated engine in the worker's place. As that
engine's step times are known, the same run gives the latency of the path between client and engine. Then the
real worker is loaded, and the load replayed in the simulator. The run is saved, so that `tailrace validate
RUN --profile FILE` can repeat the comparison.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console

from experiments.validation.command import validation_table
from experiments.validation.recorded import RecordedRun, read_run
from experiments.validation.replay import validate
from experiments.validation.stand_in import StandIn
from tailrace.profiles import Profile
from tests.harness.loadgen import StreamResult, completion_request, run_stream
from tests.harness.report import RESULTS, machine, save
from tests.harness.servers import MODEL, TailraceCluster
from tests.harness.usage import stolen_s

# Settings of `tailrace up` for a worker of the tiny model.
_BLOCK_TOKENS: Final = 32
_BLOCKS: Final = 4096
_MAX_SEQS: Final = 256
_STEP_TOKENS: Final = 2048
_MAX_MODEL_LEN: Final = 8192
_STAND_IN: Final[dict[str, object]] = {
    "kv_blocks": _BLOCKS,
    "block_tokens": _BLOCK_TOKENS,
    "max_num_seqs": _MAX_SEQS,
    "max_num_batched_tokens": _STEP_TOKENS,
    "max_model_len": _MAX_MODEL_LEN,
}


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request of the load."""

    at_s: float
    prompt: str
    output_tokens: int


def plan_requests(requests: int, rate: float, seed: int) -> list[PlannedRequest]:
    """Plan Poisson arrivals; prompts of 20 to 1,500 bytes (a token each), outputs of 16 to 600,
    log-uniform."""
    rng = random.Random(seed)
    planned, at_s = [], 0.0
    for number in range(requests):
        at_s += rng.expovariate(rate)
        length = round(20 * (1500 / 20) ** rng.random())
        # Prompts differ from the first byte on, so that none is in a prefix cache.
        prompt = (f"{rng.getrandbits(64):016x}-{number} " + "count on and on " * 100)[:length]
        planned.append(PlannedRequest(at_s, prompt, round(16 * (600 / 16) ** rng.random())))
    return planned


async def run_until_done(
    url: str, planned: Sequence[PlannedRequest], profiling: asyncio.Task[Profile]
) -> tuple[list[PlannedRequest], list[tuple[float, StreamResult]]]:
    """Run the requests repeatedly until profiling is done; return what was sent, and the results."""
    started_s, length_s = time.perf_counter(), planned[-1].at_s
    sent: list[tuple[float, PlannedRequest, asyncio.Task[StreamResult]]] = []
    for each in itertools.count():
        lap, place = divmod(each, len(planned))
        request = planned[place]
        due_s = started_s + lap * length_s + request.at_s
        await asyncio.wait({profiling}, timeout=max(0.0, due_s - time.perf_counter()))
        if profiling.done():
            break
        body = completion_request(url, MODEL, request.prompt, request.output_tokens)
        sent.append((time.perf_counter(), request, asyncio.create_task(run_stream(url, body))))
    results = [(sent_s, await stream) for sent_s, _, stream in sent]
    return [request for _, request, _ in sent], results


async def run_requests(url: str, planned: Sequence[PlannedRequest]) -> list[tuple[float, StreamResult]]:
    """Run each request at its time; return when each was sent (seconds of time.perf_counter), and its
    result."""
    started_s = time.perf_counter()

    async def one(each: PlannedRequest) -> tuple[float, StreamResult]:
        await asyncio.sleep(started_s + each.at_s - time.perf_counter())
        body = completion_request(url, MODEL, each.prompt, each.output_tokens)
        return time.perf_counter(), await run_stream(url, body)

    return list(await asyncio.gather(*(one(each) for each in planned)))


def save_run(
    folder: Path,
    planned: Sequence[PlannedRequest],
    results: Sequence[tuple[float, StreamResult]],
    path_s: float = 0.0,
) -> RecordedRun:
    """Save a run for `tailrace validate`. Raise RuntimeError if a request failed."""
    if failed := [result.error for _, result in results if result.error]:
        raise RuntimeError(f"{len(failed)} requests failed: {failed[0]}")
    folder.mkdir(parents=True, exist_ok=True)
    meta = {
        "model": MODEL,
        "vllm_version": version("vllm"),
        "engine_kwargs": {
            "max_num_seqs": _MAX_SEQS,
            "max_num_batched_tokens": _STEP_TOKENS,
            "max_model_len": _MAX_MODEL_LEN,
        },
        "kv_cache": {"block_size": _BLOCK_TOKENS, "num_gpu_blocks": _BLOCKS},
        "hardware": {"device_name": str(machine()["cpu"])},
        "path_s": path_s,
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
    rows = [
        json.dumps(
            {
                "request_id": str(number),
                "input_toks": len(each.prompt.encode()),
                "output_toks": result.tokens,
                "arrival_time": sent_s,
                "queued_ts": sent_s,
                "first_token_ts": result.event_times[0],
                "last_token_ts": result.event_times[-1],
            }
        )
        for number, (each, (sent_s, result)) in enumerate(zip(planned, results, strict=True))
    ]
    (folder / "requests.jsonl").write_text("\n".join(rows) + "\n")
    return read_run(folder)


def measure_profile(cluster: TailraceCluster, budget_s: float) -> Profile:
    """Run `tailrace profile` on the only worker; return the profile."""
    command = [sys.executable, "-m", "tailrace", "profile", "worker-0", "-o", "json"]
    command += ["--admin", cluster.admin, "--budget", str(budget_s)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=budget_s + 120).stdout
    (found,) = json.loads(output)["profiles"]
    model = {field: found[field] for field in ("model", "kv_bytes_per_token", "kv_capacity_tokens")}
    measured = {part: found[part] for part in ("prefill", "decode")}
    metadata = {"name": found["kind"], "gpu": found["hardware"], "sources": {"all": "tailrace profile"}}
    return msgspec.convert({**metadata, **model, **measured}, Profile)


async def profile_under_load(
    cluster: TailraceCluster, planned: Sequence[PlannedRequest], alone: Profile, budget_s: float
) -> tuple[Profile, float]:
    """Return the worker's profile while a stand-in serves the load, and the latency of the path in seconds.

    The path's latency is the difference between the mean TTFT of the stand-in's clients and of the simulator,
    which have the same step times.
    """
    profiling = asyncio.create_task(asyncio.to_thread(measure_profile, cluster, budget_s))
    sent, results = await run_until_done(cluster.url, planned, profiling)
    under_load = await profiling
    with tempfile.TemporaryDirectory(prefix="tailrace-validation-") as folder:
        ttft = validate(save_run(Path(folder), sent, results), alone).errors.ttft
    return under_load, max(0.0, ttft.mean_s - ttft.simulated_mean_s)


def main() -> int:
    """Run the benchmark; print and save its figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--rate", type=float, default=6.0, help="requests per second")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget", type=float, default=60.0, help="duration of each profiling of the worker")
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    options = parser.parse_args()

    console = Console(stderr=options.output == "json")
    console.print("on", machine())
    planned = plan_requests(options.requests, options.rate, options.seed)
    others = plan_requests(options.requests, options.rate, options.seed + 1)
    with TailraceCluster("tailrace", ["--workers", "1"], "rust") as cluster:
        alone = measure_profile(cluster, options.budget)
        with StandIn(cluster, "worker-0", alone, _STAND_IN):
            under_load, path_s = asyncio.run(profile_under_load(cluster, others, alone, options.budget))
        asyncio.run(run_requests(cluster.url, others[:10]))  # warm up
        console.print(f"  {len(planned)} requests in {planned[-1].at_s:.0f} s", style="dim")
        began_s, stolen_cores = time.perf_counter(), stolen_s()
        results = asyncio.run(run_requests(cluster.url, planned))
        stolen_cores = (stolen_s() - stolen_cores) / (time.perf_counter() - began_s)
    folder = RESULTS / "validation-run"
    run = save_run(folder, planned, results, path_s)
    errors: dict[str, object] = {}
    for name, profile in (("alone", alone), ("beside", under_load)):
        file = folder / f"profile-{name}.json"
        file.write_bytes(msgspec.json.encode(profile))
        validation = validate(run, profile)
        errors[name] = asdict(validation.errors)
        console.print(f"profile measured {name} ({'the path' if name == 'beside' else 'nothing'} at work):")
        console.print(validation_table(validation))
    figures: dict[str, object] = {
        "seed": options.seed,
        "rate": options.rate,
        "path_s": path_s,
        # Cores that the host gave to others under load, which no profile can include.
        "stolen_cores": stolen_cores,
        "errors": errors,
        "profiles": {"alone": msgspec.to_builtins(alone), "beside": msgspec.to_builtins(under_load)},
    }
    path = save("validation", figures)
    console.print(f"path {path_s * 1e3:.1f} ms; the host stole {stolen_cores:.2f} cores; figures: {path}")
    console.print(f"to repeat: tailrace validate {folder} --profile {folder / 'profile-beside.json'}")
    if options.output == "json":
        print(path.read_text(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
