"""Measure the pause of a live migration while both instances decode other requests."""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import grpc

from benchmarks.gpu.cluster import tailrace_cluster
from benchmarks.gpu.model import prompt
from benchmarks.gpu.setting import Budget, Setting
from benchmarks.gpu.tables import Rows
from benchmarks.transfer import migrate_once
from examples.fleet import Fleet
from tailrace.v1 import admin_pb2_grpc
from tests.harness.loadgen import completion_request, run_stream
from tests.harness.servers import MODEL, Server

_MODES = ("live", "stop and copy")
# Time for the last migration.
_RESERVE_S = 25.0


@contextmanager
def steady_load(server: Server, setting: Setting, streams: int, longest_s: float) -> Iterator[None]:
    """Keep this many streams running for the block: each one that ends is replaced."""
    stop = threading.Event()
    end = time.monotonic() + longest_s
    tokens = 4 * setting.other_tokens

    async def run_one(number: int) -> None:
        turn = 0
        while not stop.is_set() and time.monotonic() < end:
            turn += 1
            text = prompt(setting.other_tokens, setting.shape.vocab_size, 7_000_000 + 10_000 * number + turn)
            result = await run_stream(server.url, completion_request(server.url, MODEL, text, tokens), 120)
            if result.error:
                # Continue the load: a refusal must not become a busy loop.
                await asyncio.sleep(0.5)

    async def run_all() -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(streams):
                group.create_task(run_one(number))

    thread = threading.Thread(target=lambda: asyncio.run(run_all()), name="steady-load")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(timeout=150)


def run(setting: Setting, model: Path, budget: Budget) -> dict[str, object]:
    """Migrate each length, live and by stop and copy, while `others` streams decode on either instance."""
    moves: list[dict[str, object]] = []
    left_out: list[str] = []
    with tailrace_cluster(setting, model, 2) as cluster, grpc.insecure_channel(cluster.admin) as channel:
        fleet = Fleet(admin_pb2_grpc.AdminStub(channel))
        with steady_load(cluster, setting, 2 * setting.others, budget.left_s):
            for repeat in range(setting.repeats):
                for tokens in setting.moved_tokens:
                    for number, mode in enumerate(_MODES):
                        if budget.left_s < _RESERVE_S:
                            left_out.append(f"{tokens} tokens, {mode}, repeat {repeat + 1}")
                            continue
                        moves.append(asdict(migrate_once(cluster, fleet, tokens, mode, 2 * repeat + number)))
    return {"others_on_each": setting.others, "moves": moves, "not_run_for_time": left_out}


def table(figures: dict[str, object]) -> Rows:
    """Return medians, a row per length and mode."""
    moves = figures["moves"]
    assert isinstance(moves, list)
    rows = []
    for tokens, mode in dict.fromkeys((move["prompt_tokens"], move["mode"]) for move in moves):
        group = [move for move in moves if (move["prompt_tokens"], move["mode"]) == (tokens, mode)]
        medians = {
            name: statistics.median(move[name] for move in group)
            for name in ("bytes", "pause_ms", "pause_steps", "rounds", "mib_per_s")
        }
        rows.append(
            [
                f"{tokens:,} tokens, {mode}",
                f"{medians['bytes'] / (1 << 20):,.0f}",
                f"{medians['pause_ms']:,.1f}",
                f"{medians['pause_steps']:.1f}",
                f"{medians['rounds']:.0f}",
                f"{medians['mib_per_s']:,.0f}",
            ]
        )
    title = f"Pause while {figures['others_on_each']} others decode on each instance (medians)"
    left_out = figures["not_run_for_time"]
    assert isinstance(left_out, list)
    notes = [f"not run: out of time: {case}" for case in left_out]
    return Rows(title, ["request", "MiB", "pause, ms", "steps", "rounds", "MiB/s"], rows, notes)
