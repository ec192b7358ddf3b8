"""`make bench-validation`: a real vLLM worker, profiled and loaded; the same in the simulator; the error.

The worker measures its own profile first (`tailrace profile`); nothing is fitted to the load that follows. It
is kept as a recorded run, so that `tailrace validate RUN --profile FILE` repeats the comparison later.
Times are the client's: HTTP, tokenizing and placement are in them, and not in the simulator.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import msgspec
from rich.console import Console

from benchmarks.loadgen import StreamResult, completion_request, run_stream
from benchmarks.report import RESULTS, machine, save
from benchmarks.servers import MODEL, TailraceCluster
from simulator.cli.validate import validation_table
from simulator.validation.recorded import read_run
from simulator.validation.replay import validate
from tailrace.profiles import Profile, load_profile

# What `tailrace up` gives a worker of the tiny model.
_BLOCK_TOKENS = 32
_BLOCKS = 4096
_SEATS = 256
_STEP_TOKENS = 2048
_MAX_MODEL_LEN = 8192


@dataclass(frozen=True, slots=True)
class Planned:
    """One request of the load."""

    at_s: float
    prompt: str
    output_tokens: int


def plan(requests: int, rate: float, seed: int) -> list[Planned]:
    """Poisson arrivals; prompts of 20 to 1,500 bytes (a token each) and outputs of 16 to 600, log-uniform."""
    draws = random.Random(seed)
    planned, at_s = [], 0.0
    for number in range(requests):
        at_s += draws.expovariate(rate)
        length = round(20 * (1500 / 20) ** draws.random())
        # Different from the first byte on: nothing of it is in a prefix cache.
        prompt = (f"{draws.getrandbits(64):016x}-{number} " + "count on and on " * 100)[:length]
        planned.append(Planned(at_s, prompt, round(16 * (600 / 16) ** draws.random())))
    return planned


async def play(url: str, planned: Sequence[Planned]) -> list[tuple[float, StreamResult]]:
    """Each request at its time; when each was sent (seconds of time.perf_counter), and what came."""
    begun = time.perf_counter()

    async def one(each: Planned) -> tuple[float, StreamResult]:
        await asyncio.sleep(begun + each.at_s - time.perf_counter())
        body = completion_request(url, MODEL, each.prompt, each.output_tokens)
        return time.perf_counter(), await run_stream(url, body)

    return list(await asyncio.gather(*(one(each) for each in planned)))


def record(folder: Path, planned: Sequence[Planned], played: Sequence[tuple[float, StreamResult]]) -> None:
    """Leave a run as `tailrace validate` reads it. Raises RuntimeError when a request failed."""
    if failed := [result.error for _, result in played if result.error]:
        raise RuntimeError(f"{len(failed)} requests failed: {failed[0]}")
    folder.mkdir(parents=True, exist_ok=True)
    meta = {
        "model": MODEL,
        "vllm_version": version("vllm"),
        "engine_kwargs": {
            "max_num_seqs": _SEATS,
            "max_num_batched_tokens": _STEP_TOKENS,
            "max_model_len": _MAX_MODEL_LEN,
        },
        "kv_cache": {"block_size": _BLOCK_TOKENS, "num_gpu_blocks": _BLOCKS},
        "hardware": {"device_name": str(machine()["cpu"])},
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
        for number, (each, (sent_s, result)) in enumerate(zip(planned, played, strict=True))
    ]
    (folder / "requests.jsonl").write_text("\n".join(rows) + "\n")


def measured_profile(cluster: TailraceCluster, budget_s: float) -> Profile:
    """What `tailrace profile` finds for the only worker."""
    command = [sys.executable, "-m", "tailrace", "profile", "worker-0", "-o", "json"]
    command += ["--admin", cluster.admin, "--budget", str(budget_s)]
    told = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=budget_s + 120).stdout
    (found,) = json.loads(told)["profiles"]
    model = {field: found[field] for field in ("model", "kv_bytes_per_token", "kv_capacity_tokens")}
    measured = {part: found[part] for part in ("prefill", "decode")}
    facts = {"name": found["kind"], "gpu": found["hardware"], "sources": {"all": "tailrace profile"}}
    return msgspec.convert({**facts, **model, **measured}, Profile)


def main() -> int:
    """Profile, load, replay, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--rate", type=float, default=6.0, help="requests a second")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds to profile the worker")
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    options = parser.parse_args()

    console = Console(stderr=options.output == "json")
    console.print("on", machine())
    planned = plan(options.requests, options.rate, options.seed)
    with TailraceCluster("tailrace", ["--workers", "1"], "rust") as cluster:
        profile = measured_profile(cluster, options.budget)
        asyncio.run(play(cluster.url, plan(10, options.rate, options.seed + 1)))  # warm up
        console.print(f"  {len(planned)} requests in {planned[-1].at_s:.0f} s", style="dim")
        played = asyncio.run(play(cluster.url, planned))
    run = RESULTS / "validation-run"
    record(run, planned, played)
    profile_file = run / "profile.json"
    profile_file.write_bytes(msgspec.json.encode(profile))
    validation = validate(read_run(run), load_profile(str(profile_file)))
    console.print(validation_table(validation))
    figures: dict[str, object] = {
        "seed": options.seed,
        "rate": options.rate,
        "errors": asdict(validation.errors),
        "profile": msgspec.to_builtins(profile),
    }
    path = save("validation", figures)
    console.print(f"figures: {path}; again: tailrace validate {run} --profile {profile_file}")
    if options.output == "json":
        print(path.read_text(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
