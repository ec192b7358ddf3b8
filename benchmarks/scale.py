"""100 simulated workers and 1,000 concurrent streams on this machine, with each API server.

The engines cost almost nothing, so everything else is measured: HTTP, tokenization and detokenization in
vLLM's API server, Tailrace's stream path, and the workers' part of it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import uvloop
from rich.console import Console
from rich.table import Table

from tests.harness.loadgen import completion_request, percentile, run_streams
from tests.harness.report import machine, save
from tests.harness.servers import MODEL, TailraceCluster
from tests.harness.usage import cpu_seconds


@dataclass(frozen=True, slots=True)
class Run:
    """Figures of one load on one cluster."""

    front: str
    workers: int
    streams: int
    completed: int
    lost: int
    tokens: int
    tokens_per_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    cpu_s_per_1000_by_part: dict[str, float]
    load_cpu_s_per_1000: float


def run(front: str, workers: int, streams: int, tokens: int, console: Console) -> Run:
    """Start a cluster, load it, and stop it."""
    console.print(f"{front} API server: starting {workers} simulated workers", style="dim")
    arguments = ["--workers", str(workers), "--engine", "simulated", "--no-traces"]
    with TailraceCluster(f"tailrace, {front}", arguments, front) as cluster:
        requests = [
            completion_request(cluster.url, MODEL, f"stream {n} of many", tokens) for n in range(streams)
        ]
        uvloop.run(run_streams(cluster.url, requests[:50]))  # warm up
        parts = cluster.pids()
        before = {part: cpu_seconds(pids) for part, pids in parts.items()}
        own_cpu_s = cpu_seconds([os.getpid()])
        console.print(f"  {streams} streams of {tokens} tokens", style="dim")
        results = uvloop.run(run_streams(cluster.url, requests, timeout_s=600))
        used = {part: cpu_seconds(pids) - before[part] for part, pids in parts.items()}
        own_cpu_s = cpu_seconds([os.getpid()]) - own_cpu_s
    complete = [r for r in results if not r.error and r.tokens == tokens]
    total = sum(r.tokens for r in results)
    seconds = max(r.finished for r in results) - min(r.started for r in results)
    for failure in sorted({r.error for r in results if r.error})[:5]:
        console.print(f"  failed: {failure}")
    return Run(
        front=front,
        workers=workers,
        streams=streams,
        completed=len(complete),
        lost=streams - len(complete),
        tokens=total,
        tokens_per_s=total / seconds,
        ttft_p50_s=percentile([r.ttft for r in results], 0.5),
        ttft_p99_s=percentile([r.ttft for r in results], 0.99),
        cpu_s_per_1000_by_part={part: s / total * 1000 for part, s in used.items()},
        load_cpu_s_per_1000=own_cpu_s / total * 1000,
    )


def main() -> int:
    """Run once with each available API server; return 1 if a stream was lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=100)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--fronts", nargs="+", choices=["python", "rust"], default=["python", "rust"])
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    options = parser.parse_args()
    console = Console(stderr=options.output == "json")
    console.print(f"on {machine()}")
    runs = []
    for front in options.fronts:
        if front == "rust" and not (Path(sys.executable).parent / "vllm-rs").exists():
            console.print("no vllm-rs (scripts/install.sh --rust installs it): skipping the Rust API server")
            continue
        runs.append(run(front, options.workers, options.streams, options.tokens, console))
    _print(runs, console)
    figures: dict[str, object] = {"runs": [asdict(each) for each in runs]}
    path = save("scale", figures)
    if options.output == "json":
        print(json.dumps(figures))
    console.print(f"figures: {path}")
    return 1 if any(each.lost for each in runs) else 0


def _print(runs: list[Run], console: Console) -> None:
    table = Table(title="Concurrent streams through one front end")
    columns = ("API server", "workers", "streams", "lost", "tokens/s", "TTFT P50 s", "TTFT P99 s")
    for column in columns:
        table.add_column(column, justify="right")
    for each in runs:
        table.add_row(
            each.front,
            str(each.workers),
            str(each.streams),
            str(each.lost),
            f"{each.tokens_per_s:,.0f}",
            f"{each.ttft_p50_s:.2f}",
            f"{each.ttft_p99_s:.2f}",
        )
    console.print(table)
    for each in runs:
        by_part = {**each.cpu_s_per_1000_by_part, "load generator": each.load_cpu_s_per_1000}
        spent = ", ".join(
            f"{part} {seconds * 1000:.1f}"
            for part, seconds in sorted(by_part.items(), key=lambda item: -item[1])
            if seconds * 1000 >= 0.05
        )
        console.print(f"  CPU ms per 1,000 tokens, {each.front}: {spent}")


if __name__ == "__main__":
    sys.exit(main())
