"""`python -m benchmarks.transfer`: measure the transfer rate of KV, and the pause of a live migration.

Two simulated workers really create, send, verify and store KV bytes. The rate of a large migration is
compared with
`ucx_perftest` (of the same UCX), run immediately before, repeatedly; the pause of a live migration is
compared with that of stop-and-copy of the same request. All of this runs three times: as two workers on one
host, compared with the transport that ucx_perftest chooses by default; over TCP, as between hosts, compared
with ucx_perftest over TCP; and the latter with --encrypt-kv.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from dataclasses import asdict, dataclass
from http.client import HTTPResponse
from pathlib import Path

import grpc
import libucx
from rich.console import Console
from rich.table import Table

from examples.fleet import Fleet
from tailrace.local.ports import free_ports
from tailrace.v1 import admin_pb2, admin_pb2_grpc, migration_pb2, types_pb2, worker_pb2
from tests.harness.report import machine, save
from tests.harness.servers import MODEL, TailraceCluster

KV_BYTES_PER_TOKEN = 16384
# By name: the transports that UCX may use (all if empty), and further options of the workers.
WAYS: dict[str, tuple[str, list[str]]] = {
    "on one host": ("", []),
    "over TCP": ("tcp", []),
    "over TCP, encrypted": ("tcp", ["--encrypt-kv"]),
}


@dataclass(frozen=True, slots=True)
class Move:
    """Figures of one migration."""

    mode: str
    prompt_tokens: int
    bytes: int
    rounds: int
    pause_ms: float
    pause_steps: float
    # Of the largest round.
    mib_per_s: float
    # Measured by ucx_perftest immediately before.
    ceiling_mib_per_s: float


def perftest_mib_per_s(message_bytes: int, memory: str = "host") -> float:
    """Run `ucx_perftest tag_bw` between two processes on loopback; return MiB/s. `memory`: host or cuda.
    Raise
    RuntimeError if it fails."""
    folder = Path(libucx.__file__).parent
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder / "lib"), "UCX_NET_DEVICES": "lo"}
    (port,) = free_ports(1)
    tool = [str(folder / "bin" / "ucx_perftest"), "-p", str(port)]
    with subprocess.Popen(
        tool, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as server:
        try:
            load = ["127.0.0.1", "-t", "tag_bw", "-s", str(message_bytes), "-n", "64", "-w", "4"]
            load += ["-m", memory]
            for _ in range(50):
                client = subprocess.run(
                    [tool[0], *load, "-p", str(port)],
                    env=environment,
                    capture_output=True,
                    text=True,
                    timeout=120,
                    check=False,
                )
                # Final: <iterations> <50%ile> <average> <overall> <bandwidth> <overall bandwidth> ...
                if found := re.search(r"Final:\s+\d+\s+\S+\s+\S+\s+\S+\s+\S+\s+(\S+)", client.stdout):
                    return float(found.group(1)) * 1e6 / (1 << 20)
                time.sleep(0.1)  # the server is not listening yet
            raise RuntimeError(f"ucx_perftest: {client.stdout[-500:]} {client.stderr[-500:]}")
        finally:
            server.terminate()


def migrate_once(cluster: TailraceCluster, fleet: Fleet, tokens: int, mode: str, seed: int) -> Move:
    """Start a request with a prompt of `tokens`, migrate it while it decodes, and close it. Raise
    RuntimeError if the migration does not commit."""
    ceiling = perftest_mib_per_s(8 << 20)
    body = {
        "model": MODEL,
        "prompt": [(seed * 7919 + n * 31) % 200 + 20 for n in range(tokens)],
        "max_tokens": 2000,
        "ignore_eos": True,
        "stream": True,
    }
    request = urllib.request.Request(
        f"{cluster.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as stream:
        for _ in range(40):  # well into decoding
            stream.readline()
        reader = threading.Thread(target=_drain_stream, args=(stream,), daemon=True)
        reader.start()
        running = _find_request(fleet, tokens)
        target = next(i for i in fleet.instances() if i != running.instance_id)
        live = worker_pb2.COPY_MODE_PRE_COPY
        copy_mode = live if mode == "live" else worker_pb2.COPY_MODE_STOP_AND_COPY
        record = fleet.migrate(running.request_id, target, mode=copy_mode)
    if record.state != types_pb2.MIGRATION_STATE_COMMITTED:
        raise RuntimeError(f"{mode} migration of {tokens} tokens: {record.error}")
    return _to_move(record, mode, tokens, ceiling)


def _drain_stream(stream: HTTPResponse) -> None:
    try:
        while stream.read(65536):
            pass
    except (OSError, ValueError, AttributeError):
        return  # the stream was closed: the figures are complete


def _find_request(fleet: Fleet, tokens: int) -> admin_pb2.RequestInfo:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for request in fleet.requests():
            if request.prompt_tokens == tokens and request.output_tokens:
                return request
        time.sleep(0.05)
    raise TimeoutError("the request is not listed")


def _to_move(record: migration_pb2.MigrationRecord, mode: str, tokens: int, ceiling: float) -> Move:
    largest = max(record.rounds, key=lambda r: r.bytes)
    return Move(
        mode=mode,
        prompt_tokens=tokens,
        bytes=record.bytes,
        rounds=len(record.rounds),
        pause_ms=record.pause_ms,
        pause_steps=record.pause_steps,
        mib_per_s=largest.bytes / (1 << 20) / (largest.ms / 1000),
        ceiling_mib_per_s=ceiling,
    )


def main() -> int:
    """Run the benchmark; print and save its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    options = parser.parse_args()
    console = Console(stderr=options.output == "json")
    console.print(f"on {machine()}; KV of {KV_BYTES_PER_TOKEN} bytes per token")
    longest = max(options.tokens) + 4096
    worker = [f"--max-model-len={longest}", f"--kv-blocks={3 * longest // 16}"]
    worker += [f"--sim=kv_bytes_per_token={KV_BYTES_PER_TOKEN}"]
    arguments = ["--workers", "2", "--engine", "simulated", "--no-traces"]
    arguments += worker
    front = "rust" if (Path(sys.executable).parent / "vllm-rs").exists() else "python"
    figures: dict[str, object] = {"kv_bytes_per_token": KV_BYTES_PER_TOKEN}
    for way, (transports, worker_options) in WAYS.items():
        console.print(f"[bold]{way}[/bold]")
        if transports:
            os.environ["UCX_TLS"] = transports
        moves: list[Move] = []
        with TailraceCluster("tailrace", [*arguments, *worker_options], front) as cluster:
            fleet = Fleet(admin_pb2_grpc.AdminStub(grpc.insecure_channel(cluster.admin)))
            for repeat in range(options.repeats):
                for tokens in options.tokens:
                    for mode in ("live", "stop and copy"):
                        turn = f"{repeat + 1} of {options.repeats}"
                        console.print(f"  {tokens} tokens, {mode}, {turn}", style="dim")
                        moves.append(migrate_once(cluster, fleet, tokens, mode, repeat))
        figures[way] = [asdict(move) for move in moves]
        _print(moves, options.tokens, console)
    path = save("transfer", figures)
    if options.output == "json":
        print(json.dumps(figures))
    console.print(f"figures: {path}")
    return 0


def _print(moves: list[Move], lengths: list[int], console: Console) -> None:
    pause_definition = "from when the source stops the request until the target may emit tokens"
    table = Table(title=f"Medians. Pause: {pause_definition}")
    for column in ("KV", "live: pause ms", "steps", "rounds", "stop and copy: pause ms", "steps", "ratio"):
        table.add_column(column, justify="right")
    for tokens in lengths:
        live = [m for m in moves if m.prompt_tokens == tokens and m.mode == "live"]
        stop = [m for m in moves if m.prompt_tokens == tokens and m.mode != "live"]
        pause, stop_pause = (statistics.median(m.pause_ms for m in group) for group in (live, stop))
        table.add_row(
            f"{tokens:,} tokens, {statistics.median(m.bytes for m in stop) / (1 << 20):,.0f} MiB",
            f"{pause:,.1f}",
            f"{statistics.median(m.pause_steps for m in live):.1f}",
            f"{statistics.median(m.rounds for m in live):.0f}",
            f"{stop_pause:,.1f}",
            f"{statistics.median(m.pause_steps for m in stop):.1f}",
            f"{pause / stop_pause:.3f}",
        )
    console.print(table)
    largest = [m for m in moves if m.prompt_tokens == max(lengths)]
    for name, values in {
        "KV transfer including checksums and copies, MiB/s": [m.mib_per_s for m in largest],
        "ucx_perftest immediately before each, MiB/s": [m.ceiling_mib_per_s for m in largest],
        "ratio": [m.mib_per_s / m.ceiling_mib_per_s for m in largest],
    }.items():
        digits = 2 if name == "ratio" else 0
        low, middle, high = (f"{f(values):,.{digits}f}" for f in (min, statistics.median, max))
        console.print(f"{name}: median {middle} ({low} to {high})")


if __name__ == "__main__":
    sys.exit(main())
