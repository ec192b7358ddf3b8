"""Tasks that run until the first one ends, and tasks that must not be interrupted."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import time
import weakref

import pytest

from tailrace.service import tasks
from tailrace.service.tasks import (
    cancel,
    first_ended,
    in_slices,
    run_once,
    run_to_completion,
    supervise,
    supervised,
)
from tests.counting import failures_of
from tests.waiting import WAIT_S


class Broken(Exception):
    """The error of a failing task."""


async def fail() -> None:
    raise Broken


async def test_the_first_error_is_raised_without_cancelling_the_caller() -> None:
    ended = asyncio.Event()

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    for _ in range(2):
        with pytest.raises(Broken):
            await first_ended(forever(), fail())
        assert ended.is_set()
        task = asyncio.current_task()
        assert task is not None and task.cancelling() == 0


async def test_the_others_are_cancelled_when_one_returns() -> None:
    async with asyncio.timeout(WAIT_S):
        await first_ended(asyncio.sleep(0), asyncio.Event().wait())  # type: ignore[arg-type]


async def test_a_cancellation_of_the_caller_is_not_swallowed() -> None:
    """Not even if a task fails at the same time, when asyncio.TaskGroup of Python 3.11 raises that error."""
    started = asyncio.Event()

    async def fail_when_cancelled() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise Broken from None

    caller = asyncio.create_task(first_ended(fail_when_cancelled(), asyncio.sleep(3600)))
    await started.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert caller.cancelled()


async def test_an_error_keeps_no_frame_alive() -> None:
    class Buffer:
        """An object in the caller's frame."""

    kept: list[weakref.ref[Buffer]] = []

    async def hold_a_buffer() -> None:
        buffer = Buffer()
        kept.append(weakref.ref(buffer))
        await run_to_completion(fail())

    gc.disable()
    try:
        with contextlib.suppress(Broken):
            await hold_a_buffer()
        assert kept[0]() is None
    finally:
        gc.enable()


async def test_long_work_lets_other_tasks_run_between_slices() -> None:
    ran = asyncio.Event()
    other = asyncio.ensure_future(_set(ran))
    seen = 0
    # Ends only if the other task gets its turn.
    async for _ in in_slices(itertools.count()):
        seen += 1
        if ran.is_set():
            break
    assert seen > 1
    await other


async def test_a_call_of_several_turns_is_done_between_two_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    # On a slow machine the turns take longer.
    monkeypatch.setattr(tasks, "_OTHERS_S", WAIT_S)
    turns = 0

    async def call() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    other = asyncio.create_task(call())
    await asyncio.sleep(0)
    before, longest = turns, 0
    async for _ in in_slices(range(50)):
        longest, before = max(longest, turns - before), turns
        # More than a slice.
        began_s = time.monotonic()
        while time.monotonic() - began_s < 0.001:
            pass
    await cancel(other)
    assert longest >= 8


async def _set(event: asyncio.Event) -> None:
    event.set()


async def test_cancelled_tasks_have_ended_and_raise_nothing() -> None:
    ended: list[str] = []

    async def end_slowly(name: str, error: type[BaseException]) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(name)
            raise error

    tasks = [
        asyncio.create_task(end_slowly("cancelled", asyncio.CancelledError)),
        asyncio.create_task(end_slowly("broken", Broken)),
        asyncio.create_task(asyncio.sleep(0)),
    ]
    await asyncio.sleep(0)
    await cancel(*tasks)
    assert ended == ["cancelled", "broken"] and all(task.done() for task in tasks)
    assert isinstance(tasks[1].exception(), Broken)
    await cancel(*tasks)
    await cancel()


async def test_a_caller_that_is_cancelled_does_not_wait_for_the_tasks_that_it_cancels() -> None:
    stubborn, started = asyncio.Event(), asyncio.Event()

    async def resist() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await stubborn.wait()

    task = asyncio.create_task(resist())
    await started.wait()
    caller = asyncio.create_task(cancel(task))
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert not task.done()
    stubborn.set()
    await task


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "_RESTART_FIRST_S", 0.0)
    monkeypatch.setattr(tasks, "_RESTART_MAX_S", 0.0)


async def fail_in_a_group() -> None:
    """Leave `cancelling()` of this task at 1 on Python 3.11 and 3.12 though nobody cancelled it."""
    async with asyncio.TaskGroup() as group:
        group.create_task(fail())


async def cancelled_by_a_library() -> None:
    """Raise as gRPC does in a call whose channel is closed."""
    raise asyncio.CancelledError


async def overflow_the_stack() -> None:
    await overflow_the_stack()


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize(
    "failing", [fail, fail_in_a_group, cancelled_by_a_library, overflow_the_stack], ids=lambda f: f.__name__
)
async def test_a_loop_that_fails_is_counted_and_starts_again(
    failing: tasks.Loop, caplog: pytest.LogCaptureFixture
) -> None:
    name = f"loop {failing.__name__}"
    runs = itertools.count(1)
    done = asyncio.Event()

    async def loop() -> None:
        if next(runs) == 4:
            done.set()
            await asyncio.Event().wait()
        await failing()

    task = supervise(name, loop, "of a test")
    assert failures_of(name) == 0
    await asyncio.wait_for(done.wait(), WAIT_S)
    assert failures_of(name) == 3
    # The others of the same kind are counted only.
    assert [name in record.message for record in caplog.records].count(True) == 1
    assert "of a test" in caplog.text
    await cancel(task)
    assert task.cancelled()
    assert failures_of(name) == 3


@pytest.mark.usefixtures("no_pauses")
async def test_a_cancelled_loop_ends_whatever_it_raises_then() -> None:
    started = asyncio.Event()

    async def fails_when_cancelled() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            raise Broken

    async with supervised({"fails when cancelled": fails_when_cancelled}):
        await started.wait()
    assert failures_of("fails when cancelled") == 1


async def test_a_loop_that_returns_is_not_started_again() -> None:
    async def returns() -> None:
        return

    await asyncio.wait_for(supervise("returns", returns), WAIT_S)
    assert failures_of("returns") == 0


async def test_one_failing_loop_does_not_end_the_others() -> None:
    failed = asyncio.Event()
    turns = 0
    later = asyncio.Event()

    async def fails() -> None:
        failed.set()
        raise Broken

    async def works() -> None:
        nonlocal turns
        await failed.wait()
        while turns < 10:
            turns += 1
            await asyncio.sleep(0)
        later.set()

    async with supervised({"fails beside": fails, "works": works}):
        await asyncio.wait_for(later.wait(), WAIT_S)
    assert failures_of("works") == 0 < failures_of("fails beside")


async def test_a_task_that_runs_once_and_fails_is_counted_and_stays_ended(
    caplog: pytest.LogCaptureFixture,
) -> None:
    task = run_once("runs once", fail, "of a test")
    assert failures_of("runs once") == 0
    await asyncio.wait_for(task, WAIT_S)
    assert failures_of("runs once") == 1
    assert "runs once (of a test) failed" in caplog.text
