"""The simulator's prefix cache against real vLLM's, on the same requests.

Small sessions with shared instructions and documents, on one engine with the tiny model and little KV, so
that much is evicted. If requests run one at a time, the hits depend only on the order of eviction; if all
are submitted at once (four run at a time), also on the batches. Blocks are as large as the workload's units,
or smaller, so that vLLM can find parts of a unit.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from experiments.cache.placement import unbounded_hit_rate
from simulator.cluster import ClusterSpec
from simulator.request import SimRequest
from simulator.simulation import simulate
from simulator.workloads.sessions import UNIT_TOKENS, Shape, session_requests
from tailrace.intra.orders import Fcfs
from tailrace.policy.least_loaded import LeastLoaded
from tailrace.profiles import load_profile
from tailrace.tiny import MODEL_PATH
from tests.harness.report import print_json, save

SHAPE: Final = Shape(
    turns=4.0,
    gap_s=20.0,
    gap_sigma=0.8326,
    apps=4,
    instruction_tokens=300.0,
    first_tokens=150.0,
    later_tokens=100.0,
    answer_tokens=24.0,
    documents=12,
    document_share=0.5,
    document_tokens=600.0,
)
KV_TOKENS: Final = 12_800
_MAX_TOKENS: Final = 2_900
_MAX_SEQS: Final = 4
_STEP_TOKENS: Final = 2_048
# Each request has ended when the next one arrives.
_SPACING_S: Final = 1_000.0
_PROFILE: Final = "llama-3.1-8b-h100"
_CHILD_S: Final = 900.0


@dataclass(frozen=True, slots=True)
class Agreement:
    """Hits for one way of submitting requests, as shares of all prompt tokens. `equal`: requests with the
    same hits in both."""

    block_tokens: int
    way: str
    requests: int
    equal: int
    unbounded: float
    vllm: float
    simulated: float


def workload(count: int, seed: int) -> list[SimRequest]:
    """Return sessions, without the turns that are too long for the model."""
    requests = session_requests("sessions", SHAPE, count, 4.0, seed)
    return [each for each in requests if each.prompt_tokens + each.answer_tokens <= _MAX_TOKENS]


def token_additions(requests: Sequence[SimRequest]) -> list[tuple[str, list[int], int]]:
    """Return session, new tokens and answer length of each request. Equal units are equal tokens, all below
    256
    (byte-level)."""
    job: list[tuple[str, list[int], int]] = []
    context_tokens: dict[str, int] = {}
    for each in requests:
        before = context_tokens.get(each.session_id, 0)
        tokens: list[int] = []
        if not before:
            for name in each.unit_names[: each.prompt_tokens // UNIT_TOKENS]:
                tokens += _random_tokens(f"unit {name}", UNIT_TOKENS)
        tokens += _random_tokens(f"request {each.request_id}", each.prompt_tokens - before - len(tokens))
        context_tokens[each.session_id] = each.prompt_tokens + each.answer_tokens
        job.append((each.session_id, tokens, each.answer_tokens))
    return job


def _random_tokens(name: str, count: int) -> list[int]:
    rng = random.Random(name)
    return [rng.randrange(256) for _ in range(count)]


def vllm_hits(requests: Sequence[SimRequest], block_tokens: int) -> dict[str, list[int]]:
    """Return the cached tokens of each request in vLLM, `alone` and `together`; and the prompts' lengths."""
    engine = {
        "model": str(MODEL_PATH),
        "dtype": "float32",
        "max_num_seqs": _MAX_SEQS,
        "max_num_batched_tokens": _STEP_TOKENS,
        "max_model_len": _MAX_TOKENS,
        "block_size": block_tokens,
        # Far more than needed: by default vLLM takes most of the machine's memory.
        "kv_cache_memory_bytes": 1 << 27,
        # vLLM keeps one block for itself.
        "num_gpu_blocks_override": KV_TOKENS // block_tokens + 1,
    }
    job = json.dumps({"engine": engine, "requests": token_additions(requests)})
    done = subprocess.run(
        [sys.executable, "-m", "experiments.cache.vllm_hits"],
        input=job,
        capture_output=True,
        text=True,
        timeout=_CHILD_S,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise RuntimeError(f"vLLM exited with {done.returncode}:\n{done.stderr[-3000:]}")
    found: dict[str, list[int]] = json.loads(lines[-1].removeprefix("RESULT "))
    return found


def simulated_hits(requests: Sequence[SimRequest], spacing_s: float, block_tokens: int) -> list[int]:
    """Return the cached tokens of each request on a simulated instance."""
    spec = ClusterSpec.uniform(
        1,
        load_profile(_PROFILE),
        prefix_caching=True,
        kv_capacity_tokens=KV_TOKENS,
        block_tokens=block_tokens,
        max_num_seqs=_MAX_SEQS,
        chunk_budget_tokens=_STEP_TOKENS,
        host_kv_bytes=0,
    )
    spaced = [replace(each, arrival_s=spacing_s * place) for place, each in enumerate(requests)]
    records = simulate(spec, spaced, LeastLoaded(), Fcfs()).requests
    by_id = {record.request_id: record.cached_tokens for record in records}
    return [by_id[each.request_id] for each in requests]


def compare(count: int, seed: int, block_tokens: int) -> list[Agreement]:
    """Compare vLLM and the simulator for both ways of submitting requests."""
    requests = workload(count, seed)
    found = vllm_hits(requests, block_tokens)
    total = sum(each.prompt_tokens for each in requests)
    if found["prompts"] != [each.prompt_tokens for each in requests]:
        raise RuntimeError("vLLM got other prompts")
    result: list[Agreement] = []
    for arrivals, spacing_s in (("alone", _SPACING_S), ("together", 0.0)):
        ours = simulated_hits(requests, spacing_s, block_tokens)
        result.append(
            Agreement(
                block_tokens=block_tokens,
                way=arrivals,
                requests=len(requests),
                equal=sum(a == b for a, b in zip(ours, found[arrivals], strict=True)),
                unbounded=unbounded_hit_rate(requests),
                vllm=sum(found[arrivals]) / total,
                simulated=sum(ours) / total,
            )
        )
    return result


def table(agreements: Sequence[Agreement]) -> Table:
    """Return a table with one row per comparison."""
    result = Table(title=f"Cached prompt tokens, {KV_TOKENS} tokens of KV, units of {UNIT_TOKENS}")
    result.add_column("block", justify="right")
    result.add_column("submitted")
    for heading in ("requests", "equal", "unbounded %", "vLLM %", "simulated %"):
        result.add_column(heading, justify="right")
    for each in agreements:
        shares = [f"{100 * share:.2f}" for share in (each.unbounded, each.vllm, each.simulated)]
        result.add_row(str(each.block_tokens), each.way, str(each.requests), str(each.equal), *shares)
    return result


def main(arguments: Sequence[str] | None = None) -> Path:
    """Run the benchmark; return the path of the figures."""
    parser = argparse.ArgumentParser(prog="python -m experiments.cache.against_vllm", description=__doc__)
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    options = parser.parse_args(arguments)
    agreements = [each for block in (64, 32) for each in compare(options.requests, options.seed, block)]
    figures: dict[str, object] = {"runs": [asdict(each) for each in agreements]}
    path = save("cache_vllm", figures)
    if options.output == "json":
        print_json("cache_vllm", figures)
    else:
        Console(width=None if sys.stdout.isatty() else 120).print(table(agreements))
    Console(stderr=True).print(f"saved to {path}")
    return path


if __name__ == "__main__":
    main()
