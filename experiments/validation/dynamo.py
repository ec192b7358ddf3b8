"""The same trace, fleet and step times in the offline replay of NVIDIA Dynamo (`ai-dynamo`) and here.

Both place by round robin, serve first come first served, and cache prefixes in the trace's own blocks. Dynamo
runs in a Python of its own (`--python`), in which `ai-dynamo` and `aisimulate` are installed. Its step times
are a table by the prompt tokens of a step, and by KV tokens and mean context, so the profile is used without
what such a table cannot say: the time of a prompt's attention, and of the pass that prefill and decode share.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from simulator.cluster import ClusterSpec
from simulator.setups import setup_for
from simulator.simulation import simulate
from simulator.workloads.resolve import WorkloadOptions, resolve_workload
from tailrace.perf.steps import Floats
from tailrace.policy.deployment import Deployment
from tailrace.profiles import Profile, load_profile

# Of vLLM, for both.
STEP_TOKENS: Final = 2_048
MAX_SEQS: Final = 256
# Tokens of a block: those that the trace names, so that both cache the same.
BLOCK_TOKENS: Final = 512
_GRID: Final = 400
_PERCENTS: Final = (50, 90, 99)

# What runs in Dynamo's Python: arguments on stdin, the report on stdout.
_REPLAY: Final = """
import json, sys, time
from dynamo.replay import run_trace_replay
arguments = json.load(sys.stdin)
began_s, began_cpu_s = time.perf_counter(), time.process_time()
report = run_trace_replay(arguments.pop("trace"), capture_per_request=True, **arguments)
times = {"wall_s": time.perf_counter() - began_s, "cpu_s": time.process_time() - began_cpu_s}
json.dump({**times, "summary": report.summary, "requests": report.per_request}, sys.stdout)
"""


def as_table(profile: Profile) -> Profile:
    """Return the profile with step times that a table by tokens can have."""
    prefill = msgspec.structs.replace(profile.prefill, base_ms=0.0, ms_per_token_squared=0.0)
    return msgspec.structs.replace(profile, prefill=prefill)


def write_step_times(profile: Profile, path: Path) -> None:
    """Write the profile's step times as the table that Dynamo's engine reads."""
    prefill, decode = profile.prefill, profile.decode
    tokens = np.linspace(1.0, STEP_TOKENS, _GRID)
    kv_tokens = np.linspace(0.0, float(profile.kv_capacity_tokens), _GRID)
    context = np.linspace(1.0, 131_072.0, _GRID)
    batch = np.minimum(np.maximum(1.0, kv_tokens[:, np.newaxis] / context), MAX_SEQS)
    step_ms = (
        decode.base_ms + decode.ms_per_request * batch + decode.ms_per_kv_token * kv_tokens[:, np.newaxis]
    )
    np.savez(
        path,
        prefill_isl=tokens,
        prefill_ttft_ms=prefill.ms_per_token * tokens,
        decode_active_kv_tokens=kv_tokens,
        decode_context_length=context,
        decode_itl=step_ms,
    )


def in_dynamo(python: Path, trace: Path, profile: Profile, instances: int, folder: Path) -> Mapping[str, Any]:
    """Replay the trace there. Raise CalledProcessError if that fails."""
    table = folder / "steps.npz"
    write_step_times(profile, table)
    engine = {
        "num_gpu_blocks": profile.kv_capacity_tokens // BLOCK_TOKENS,
        "block_size": BLOCK_TOKENS,
        "max_num_seqs": MAX_SEQS,
        "max_num_batched_tokens": STEP_TOKENS,
        "enable_prefix_caching": True,
        "timing_model": {"type": "external", "provider": "dynamo_profile", "config": {"path": str(table)}},
    }
    arguments = {
        "trace": str(trace),
        "extra_engine_args": {"engine": engine},
        "num_workers": instances,
        "trace_block_size": BLOCK_TOKENS,
    }
    done = subprocess.run(
        [python, "-c", _REPLAY], input=json.dumps(arguments), capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@dataclass(frozen=True, slots=True)
class Replayed:
    """One simulator's results; times in seconds, one entry per request in the order of the trace."""

    ttft_s: Floats
    tpot_s: Floats
    latency_s: Floats
    cached_share: float
    cpu_s: float


def of_dynamo(found: Mapping[str, Any]) -> Replayed:
    """Read Dynamo's report."""
    requests = sorted(found["requests"], key=lambda r: (r["arrival_time_ms"], r["input_length"]))
    made = np.array([max(1, r["output_length"] - 1) for r in requests], dtype=np.float64)
    ttft_s = np.array([r["ttft_ms"] for r in requests]) / 1e3
    latency_s = np.array([r["e2e_latency_ms"] for r in requests]) / 1e3
    cached = sum(r["reused_input_tokens"] for r in requests) / sum(r["input_length"] for r in requests)
    return Replayed(ttft_s, (latency_s - ttft_s) / made, latency_s, cached, found["cpu_s"])


def simulated(trace: Path, profile: Profile, instances: int) -> Replayed:
    """Replay the trace here."""
    arriving = resolve_workload(f"mooncake:{trace}", WorkloadOptions()).requests
    spec = ClusterSpec.uniform(
        instances,
        profile,
        prefix_caching=True,
        block_tokens=BLOCK_TOKENS,
        max_num_seqs=MAX_SEQS,
        chunk_budget_tokens=STEP_TOKENS,
        # Preempted requests are computed again, as there.
        host_kv_bytes=0,
    )
    setup = setup_for("round_robin")
    began_s = time.process_time()
    result = simulate(spec, arriving, setup.policy(Deployment()), setup.intra())
    cpu_s = time.process_time() - began_s
    records = sorted(result.requests, key=lambda r: (r.arrival_s, r.prompt_tokens))
    cached = sum(r.cached_tokens for r in records) / sum(r.prompt_tokens for r in records)
    columns = ([r.ttft_s for r in records], [r.tpot_s for r in records], [r.latency_s for r in records])
    ttft_s, tpot_s, latency_s = (np.array(column, dtype=np.float64) for column in columns)
    return Replayed(ttft_s, tpot_s, latency_s, cached, cpu_s)


def table(dynamo: Replayed, ours: Replayed) -> Table:
    """Return both, and the difference."""
    result = Table(title=f"{len(ours.ttft_s)} requests")
    for heading in ("", "Dynamo", "here", "here / Dynamo"):
        result.add_column(heading, justify="right" if heading else "left")
    rows: list[tuple[str, float, float]] = []
    for name, unit, factor, theirs, own in (
        ("TTFT", "s", 1.0, dynamo.ttft_s, ours.ttft_s),
        ("TPOT", "ms", 1e3, dynamo.tpot_s, ours.tpot_s),
        ("end to end", "s", 1.0, dynamo.latency_s, ours.latency_s),
    ):
        for percent in _PERCENTS:
            there, here = (factor * float(np.nanpercentile(c, percent)) for c in (theirs, own))
            rows.append((f"{name} P{percent} {unit}", there, here))
    rows.append(("cached share %", 100 * dynamo.cached_share, 100 * ours.cached_share))
    rows.append(("CPU s", dynamo.cpu_s, ours.cpu_s))
    for name, found, made_here in rows:
        result.add_row(name, f"{found:.3f}", f"{made_here:.3f}", f"{made_here / found:.3f}")
    return result


def at_speed(line: str, speed: float) -> str:
    """Return a request of the trace at its time divided by `speed`, in whole milliseconds as all are."""
    request = json.loads(line)
    return json.dumps({**request, "timestamp": round(request["timestamp"] / speed)})


def main() -> None:
    """Replay in both, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path, help="in Mooncake's format")
    parser.add_argument("--python", type=Path, required=True, help="of an environment with ai-dynamo")
    parser.add_argument("--requests", type=int, default=5_724, help="from the beginning of the trace")
    parser.add_argument("--speed", type=float, default=1.0, help="of the trace's time")
    parser.add_argument("--instances", type=int, default=4)
    parser.add_argument("--profile", default="llama-3.1-8b-h100")
    options = parser.parse_args()
    profile = as_table(load_profile(options.profile))
    with tempfile.TemporaryDirectory(prefix="tailrace-dynamo-") as name:
        part = Path(name) / "part.jsonl"
        lines = options.trace.read_text().splitlines()[: options.requests]
        part.write_text("".join(f"{at_speed(line, options.speed)}\n" for line in lines))
        dynamo = of_dynamo(in_dynamo(options.python, part, profile, options.instances, Path(name)))
        ours = simulated(part, profile, options.instances)
    Console(width=100).print(table(dynamo, ours))
    same = np.abs(ours.ttft_s - dynamo.ttft_s)
    print(
        f"TTFT of the same request differs by {np.median(same):.4f} s (median), {np.mean(same):.4f} s (mean)"
    )


if __name__ == "__main__":
    main()
