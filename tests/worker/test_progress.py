"""Detection of an engine that hangs in its own thread while the event loop continues."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.cluster import Phase
from tests.waiting import WAIT_S
from tests.worker.simulated import SMALL, Fleet
from worker_agent.engine.base import EngineStats, RequestStats
from worker_agent.engine.step_times import LARGE_STEPS_MIN, SMALL_STEPS_MIN, RecentStepTimes
from worker_agent.progress import StepBounds, StepProgress, watch_progress

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
    """Return the stats of an engine with one request."""
    request = RequestStats("r", "f", 0, Phase.REASONING, state, 10, 5, 5, 100, 1, 0.0, 10.0)
    return replace(IDLE, requests=[request], steps=steps)


BOUNDS = StepBounds(2.0, 10.0)


def test_running_requests_without_a_step_are_a_hang() -> None:
    progress = StepProgress(BOUNDS, 0.0)
    stood = [progress.stuck_for_s(busy(1), now_s) for now_s in (1.0, 6.0, 11.0, 11.5)]
    assert stood == [None, None, None, 10.5]


@pytest.mark.parametrize(("expected_s", "max_s"), [(0.001, 2.0), (0.5, 5.0), (50.0, 10.0), (None, 10.0)])
def test_hang_limit_follows_from_earlier_steps(expected_s: float | None, max_s: float) -> None:
    progress = StepProgress(BOUNDS, 0.0)
    stats = replace(busy(1), expected_step_s=expected_s)
    assert progress.stuck_for_s(stats, 1.0) is None
    assert progress.stuck_for_s(stats, 1.0 + max_s) is None
    assert progress.stuck_for_s(stats, 1.1 + max_s) is not None


def test_too_few_steps_leave_the_default_limit() -> None:
    times = RecentStepTimes()
    for _ in range(SMALL_STEPS_MIN - 1):
        times.add(0.01, 4)
    assert times.expected_s(4) is None
    times.add(0.03, 127)
    assert times.expected_s(4) == 0.03
    # Without a computed prompt, the time of a long one is unknown, however fast the other steps are.
    assert times.expected_s(2048) is None
    for _ in range(LARGE_STEPS_MIN):
        times.add(0.2, 1000)
    assert times.expected_s(2000) == pytest.approx(0.4)
    assert times.expected_s(127) == 0.03
    # Steps without tokens say nothing about others.
    times.add(60.0, 0)
    assert times.expected_s(4) == 0.03


def test_effect_of_one_long_step_fades() -> None:
    times = RecentStepTimes()
    times.add(60.0, 4)
    for _ in range(500):
        times.add(0.01, 4)
    assert times.expected_s(4) == 60.0
    for _ in range(1_000):
        times.add(0.01, 4)
    assert times.expected_s(4) == 0.01


@given(st.lists(st.tuples(st.floats(0.001, 100.0), st.integers(1, 4096)), min_size=1, max_size=300))
def test_no_observed_step_counts_as_a_hang(steps: list[tuple[float, int]]) -> None:
    times, bounds = RecentStepTimes(), StepBounds(0.0, math.inf)
    for seconds, tokens in steps:
        times.add(seconds, tokens)
    for seconds, tokens in steps:
        assert bounds.max_s(times.expected_s(tokens)) >= seconds


def test_simulated_engine_reports_its_step_times() -> None:
    fleet = Fleet(SMALL)
    assert fleet.engines[0].stats().expected_step_s is None
    for number in range(4):
        fleet.submit(0, [65 + number] * 4, max_tokens=40, ignore_eos=True)
    fleet.clock.advance(60)
    expected_s = fleet.engines[0].stats().expected_step_s
    # A step takes some milliseconds in the profile.
    assert expected_s is not None and 0.001 < expected_s < 0.1


def test_hung_engine_is_detected_well_before_the_limit() -> None:
    fleet = Fleet(SMALL)
    fleet.submit(0, [65] * 4, max_tokens=60, ignore_eos=True)
    fleet.clock.advance(40)
    fleet.faults[0].hang = True
    fleet.clock.advance(2)
    progress, stats = StepProgress(StepBounds(30.0, 300.0), 0.0), fleet.engines[0].stats()
    assert [request.state for request in stats.requests] == ["running"]
    assert progress.stuck_for_s(stats, 1.0) is None
    assert progress.stuck_for_s(stats, 30.0) is None
    assert progress.stuck_for_s(stats, 31.5) == 30.5


def test_compiling_step_may_take_up_to_the_limit() -> None:
    progress = StepProgress(BOUNDS, 0.0)
    before = replace(busy(1), expected_step_s=0.001)
    assert progress.stuck_for_s(before, 1.0) is None
    compiling = replace(before, compiling=True)
    assert progress.stuck_for_s(compiling, 10.0) is None
    assert progress.stuck_for_s(compiling, 11.5) == 10.5
    # The rest of the step has a time limit of its own.
    after = replace(before, compilations=1)
    assert progress.stuck_for_s(after, 10.9) is None
    assert progress.stuck_for_s(after, 12.5) is None
    assert progress.stuck_for_s(after, 13.0) is not None


def test_every_step_is_progress() -> None:
    progress = StepProgress(BOUNDS, 0.0)
    assert not any(progress.stuck_for_s(busy(step), 9.0 * step) for step in range(20))


@pytest.mark.parametrize("stats", [IDLE, busy(1, "waiting"), busy(1, "paused"), busy(1, "preempted")])
def test_idle_engine_is_not_hung(stats: EngineStats) -> None:
    progress = StepProgress(BOUNDS, 0.0)
    assert not any(progress.stuck_for_s(stats, now_s) for now_s in (0.0, 100.0, 200.0))
    # A request that begins to run then has the full time.
    assert not progress.stuck_for_s(busy(stats.steps), 205.0)


def test_frozen_process_does_not_report_a_hang() -> None:
    progress = StepProgress(BOUNDS, 0.0)
    assert not progress.stuck_for_s(busy(1), 1.0)
    progress.extend_deadlines(60.0)
    assert not progress.stuck_for_s(busy(1), 65.0)
    assert progress.stuck_for_s(busy(1), 72.0)


async def test_hang_is_reported_once() -> None:
    messages: list[str] = []
    progress = StepProgress(StepBounds(0.01, 0.01), asyncio.get_running_loop().time())
    async with asyncio.timeout(WAIT_S):
        await watch_progress(lambda: busy(1), progress, messages.append)
    assert (progress.steps, progress.running) == (1, True)
    assert len(messages) == 1 and "finished no step for 0.0" in messages[0]
