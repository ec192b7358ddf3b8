"""Tasks that run until the first one ends, and tasks that must not be interrupted."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import time
import weakref

import pytest

from tailrace.service.tasks import cancel, first_ended, in_slices, run_to_completion


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
    async with asyncio.timeout(10):
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


async def test_a_call_of_several_turns_is_done_between_two_slices() -> None:
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
