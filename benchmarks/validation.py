"""`make bench-validation`: a real vLLM worker, profiled and loaded; the same in the simulator; the error.

Nothing is fitted to the load that is compared. The worker measures its own profile (`tailrace profile`)
twice: alone, and while all that serves such a load works beside it, with a simulated engine in the worker's
place. That engine's times are known, so that the same minute tells how long the path between client and
engine is. Then the real worker is loaded, and the load replayed in the simulator. The run is kept, so that
`tailrace validate RUN --profile FILE` repeats the comparison later.
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

from benchmarks.loadgen import StreamResult, completion_request, run_stream
from benchmarks.processes import stolen_s
from benchmarks.report import RESULTS, machine, save
from benchmarks.servers import MODEL, TailraceCluster
from benchmarks.stand_in import StandIn
from simulator.cli.validate import validation_table
from simulator.validation.recorded import RecordedRun, read_run
from simulator.validation.replay import validate
from tailrace.profiles import Profile

# What `tailrace up` gives a worker of the tiny model.
_BLOCK_TOKENS: Final = 32
_BLOCKS: Final = 4096
_SEATS: Final = 256
_STEP_TOKENS: Final = 2048
_MAX_MODEL_LEN: Final = 8192
_STAND_IN: Final[dict[str, object]] = {
    "kv_blocks": _BLOCKS,
    "block_tokens": _BLOCK_TOKENS,
    "max_num_seqs": _SEATS,
    "max_num_batched_tokens": _STEP_TOKENS,
    "max_model_len": _MAX_MODEL_LEN,
}


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


async def play_until(
    url: str, planned: Sequence[Planned], working: asyncio.Task[Profile]
) -> tuple[list[Planned], list[tuple[float, StreamResult]]]:
    """As `play`, over and over until the work is done: what was sent, and what came of it."""
    begun, length_s = time.perf_counter(), planned[-1].at_s
    sent: list[tuple[float, Planned, asyncio.Task[StreamResult]]] = []
    for each in itertools.count():
        lap, place = divmod(each, len(planned))
        request = planned[place]
        due_s = begun + lap * length_s + request.at_s
        await asyncio.wait({working}, timeout=max(0.0, due_s - time.perf_counter()))
        if working.done():
            break
        body = completion_request(url, MODEL, request.prompt, request.output_tokens)
        sent.append((time.perf_counter(), request, asyncio.create_task(run_stream(url, body))))
    played = [(sent_s, await stream) for sent_s, _, stream in sent]
    return [request for _, request, _ in sent], played


async def play(url: str, planned: Sequence[Planned]) -> list[tuple[float, StreamResult]]:
    """Each request at its time; when each was sent (seconds of time.perf_counter), and what came."""
    begun = time.perf_counter()

    async def one(each: Planned) -> tuple[float, StreamResult]:
        await asyncio.sleep(begun + each.at_s - time.perf_counter())
        body = completion_request(url, MODEL, each.prompt, each.output_tokens)
        return time.perf_counter(), await run_stream(url, body)

    return list(await asyncio.gather(*(one(each) for each in planned)))


def record(
    folder: Path,
    planned: Sequence[Planned],
    played: Sequence[tuple[float, StreamResult]],
    path_s: float = 0.0,
) -> RecordedRun:
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
        for number, (each, (sent_s, result)) in enumerate(zip(planned, played, strict=True))
    ]
    (folder / "requests.jsonl").write_text("\n".join(rows) + "\n")
    return read_run(folder)


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


async def profile_beside(
    cluster: TailraceCluster, planned: Sequence[Planned], alone: Profile, budget_s: float
) -> tuple[Profile, float]:
    """(The worker's profile while a stand-in carries the load, seconds between client and engine both ways.)

    The path is what the mean TTFT of a client of the stand-in has beyond the simulator's: the step times of
    both are the same.
    """
    working = asyncio.create_task(asyncio.to_thread(measured_profile, cluster, budget_s))
    sent, played = await play_until(cluster.url, planned, working)
    beside = await working
    with tempfile.TemporaryDirectory(prefix="tailrace-validation-") as folder:
        ttft = validate(record(Path(folder), sent, played), alone).errors.ttft
    return beside, max(0.0, ttft.mean_s - ttft.simulated_mean_s)


def main() -> int:
    """Profile, load, replay, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--rate", type=float, default=6.0, help="requests a second")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds to profile the worker, each time")
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    options = parser.parse_args()

    console = Console(stderr=options.output == "json")
    console.print("on", machine())
    planned = plan(options.requests, options.rate, options.seed)
    others = plan(options.requests, options.rate, options.seed + 1)
    with TailraceCluster("tailrace", ["--workers", "1"], "rust") as cluster:
        alone = measured_profile(cluster, options.budget)
        with StandIn(cluster, "worker-0", alone, _STAND_IN):
            beside, path_s = asyncio.run(profile_beside(cluster, others, alone, options.budget))
        asyncio.run(play(cluster.url, others[:10]))  # warm up
        console.print(f"  {len(planned)} requests in {planned[-1].at_s:.0f} s", style="dim")
        began_s, stolen = time.perf_counter(), stolen_s()
        played = asyncio.run(play(cluster.url, planned))
        stolen = (stolen_s() - stolen) / (time.perf_counter() - began_s)
    folder = RESULTS / "validation-run"
    run = record(folder, planned, played, path_s)
    errors: dict[str, object] = {}
    for name, profile in (("alone", alone), ("beside", beside)):
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
        # Cores that the host gave to others under load: no profile can know of that.
        "stolen_cores": stolen,
        "errors": errors,
        "profiles": {"alone": msgspec.to_builtins(alone), "beside": msgspec.to_builtins(beside)},
    }
    path = save("validation", figures)
    console.print(f"path {path_s * 1e3:.1f} ms; the host took {stolen:.2f} cores; figures: {path}")
    console.print(f"again: tailrace validate {folder} --profile {folder / 'profile-beside.json'}")
    if options.output == "json":
        print(path.read_text(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
