"""An engine that hangs in its own thread, while the event loop beside it goes on."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from worker_agent.engine.base import EnginePhase, EngineStats, RequestStats
from worker_agent.progress import Progress, watch_progress
from worker_agent.worker import _background

IDLE = EngineStats(
    requests=[],
    kv_blocks_used=0,
    kv_blocks_total=10,
    host_kv_bytes_used=0,
    host_kv_bytes_total=0,
    prefill_backlog_tokens=0,
    steps=7,
    generated_tokens=0,
    preemptions=0,
    token_interval_ms_mean=0.0,
    token_interval_ms_p99=0.0,
)


def busy(steps: int, state: str = "running") -> EngineStats:
    """With one request."""
    request = RequestStats("r", "f", 0, EnginePhase.REASONING, state, 10, 5, 5, 100, 1, 0.0, 10.0)
    return replace(IDLE, requests=[request], steps=steps)


def test_requests_to_run_and_no_step() -> None:
    progress = Progress(10.0, 0.0)
    assert [progress.stuck(busy(1), now_s) for now_s in (1.0, 6.0, 11.0, 11.5)] == [False, False, False, True]


def test_every_step_is_progress() -> None:
    progress = Progress(10.0, 0.0)
    assert not any(progress.stuck(busy(step), 9.0 * step) for step in range(20))


@pytest.mark.parametrize("stats", [IDLE, busy(1, "waiting"), busy(1, "paused"), busy(1, "preempted")])
def test_nothing_to_run_is_no_hang(stats: EngineStats) -> None:
    progress = Progress(10.0, 0.0)
    assert not any(progress.stuck(stats, now_s) for now_s in (0.0, 100.0, 200.0))
    # What begins to run then has the whole time.
    assert not progress.stuck(busy(stats.steps), 205.0)


def test_a_process_that_stood_still_blames_nobody() -> None:
    progress = Progress(10.0, 0.0)
    assert not progress.stuck(busy(1), 1.0)
    progress.excuse(60.0)
    assert not progress.stuck(busy(1), 65.0)
    assert progress.stuck(busy(1), 72.0)


async def test_it_is_said_once() -> None:
    said: list[str] = []
    async with asyncio.timeout(20):
        await watch_progress(lambda: busy(1), 0.01, said.append)
    assert len(said) == 1 and "ended no step for 0.01 s" in said[0]


async def test_a_background_task_that_fails_ends_the_worker() -> None:
    died: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def fail() -> None:
        raise ZeroDivisionError("a mistake")

    async with asyncio.timeout(20), _background("heartbeats", fail(), died.set_result):
        assert await died == "heartbeats failed: a mistake"
