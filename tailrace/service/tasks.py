"""Run loops that outlive their failures, tasks that end together, work in slices or without interruption.

An exception keeps the frames that it passed, with everything in them. A task that failed keeps its exception;
one that was cancelled keeps its CancelledError until someone asks for it (`task_error`). If one of these
frames has the task in turn, in a variable or in an object that keeps a task of its own method, that is a
circle, which holds buffers, mappings and file descriptors until the next full collection, hours later. So
the functions here drop what they held before they raise, and an object keeps no task that has ended.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Final, TypeVar

from tailrace.telemetry.incidents import guarded, loop_failed, loop_named

T = TypeVar("T")

Loop = Callable[[], Coroutine[object, object, None]]
"""Starts a coroutine that runs for as long as its owner needs it."""


class Backoff:
    """Double the delay from `first_s` to `max_s`, drawing each from the upper half of its range.

    The random draw spreads out processes that lost the same peer at the same moment.
    """

    def __init__(self, first_s: float, max_s: float, draw: Callable[[], float] = random.random) -> None:
        """`draw` returns numbers in [0, 1)."""
        self._first_s = first_s
        self._max_s = max_s
        self._draw = draw
        self._failures = 0

    def next_s(self) -> float:
        """Return the seconds to wait before the next attempt; at most `max_s`."""
        whole_s = min(self._max_s, self._first_s * 2.0**self._failures)
        if whole_s < self._max_s:
            self._failures += 1
        return whole_s * (1.0 + self._draw()) / 2.0

    def reset(self) -> None:
        """Start with the shortest delay again after a success."""
        self._failures = 0


# Pause before a failed loop is started again. At most two seconds: front ends take a worker whose heartbeats
# miss three for lost.
_RESTART_FIRST_S: Final = 0.1
_RESTART_MAX_S: Final = 2.0
# A loop that has run for so long before it failed is started again after the shortest pause.
_STABLE_S: Final = 10.0


def supervise(name: str, loop: Loop, which: str = "") -> asyncio.Task[None]:
    """Run a loop until it returns or the task is cancelled; when it raises, log, count, and start it again.

    `name` is the loop's label in `tailrace_loop_failures_total`: one of few; `which` tells loops of one name
    apart in the log.
    """
    loop_named(name)
    return asyncio.create_task(_supervised(name, loop, which), name=f"supervises {name} {which}".rstrip())


def run_once(name: str, loop: Loop, which: str = "") -> asyncio.Task[None]:
    """Run a loop that its owner starts when there is work; log and count what it raises, as `supervise` does,
    but leave it ended."""
    loop_named(name)
    return asyncio.create_task(_guarded(name, loop, which), name=f"{name} {which}".rstrip())


@asynccontextmanager
async def supervised(loops: Mapping[str, Loop]) -> AsyncIterator[None]:
    """Supervise loops by name during the block; none of them depends on another."""
    tasks = [supervise(name, loop) for name, loop in loops.items()]
    try:
        yield
    finally:
        await cancel(*tasks)


async def _call(loop: Loop) -> None:
    await loop()


async def _guarded(name: str, loop: Loop, which: str) -> None:
    with guarded(name, which):
        await loop()


async def _supervised(name: str, loop: Loop, which: str) -> None:
    backoff = Backoff(_RESTART_FIRST_S, _RESTART_MAX_S)
    while True:
        began_s = time.monotonic()
        # In a task of its own: a CancelledError that comes out of it is then a failure unless this task was
        # cancelled. gRPC raises one when it closes a channel, and `cancelling()` does not tell after a
        # TaskGroup.
        run = asyncio.create_task(_call(loop), name=f"{name} {which}".rstrip())
        try:
            await asyncio.wait([run])
        except asyncio.CancelledError:
            await cancel(run)
            if (error := task_error(run)) is not None:
                loop_failed(name, which, error)
            raise
        error = asyncio.CancelledError() if run.cancelled() else run.exception()
        if error is None:
            return
        loop_failed(name, which, error)
        # The exception's frames hold what the loop did, and this frame holds the exception.
        del run, error
        if time.monotonic() - began_s > _STABLE_S:
            backoff.reset()
        await asyncio.sleep(backoff.next_s())


async def first_ended(*coroutines: Coroutine[object, object, None]) -> None:
    """Run coroutines together; when one ends, cancel the others, and raise what it raised.

    Unlike asyncio.TaskGroup of Python 3.11 and 3.12, this never swallows a cancellation of its caller, and
    leaves no trace in the caller's `cancelling()` when a coroutine fails: CancelledError alone says whether
    the caller was cancelled.
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    first: list[asyncio.Task[None]] = []
    errors: list[BaseException] = []
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        first.extend(task for task in tasks if task.done())
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for task, result in zip(tasks, results, strict=True):
            if task in first and isinstance(result, BaseException):
                errors.append(result)
        tasks.clear()
        first.clear()
        results.clear()
        del task, result
    if errors:
        raise errors.pop(0)


async def cancel(*tasks: asyncio.Task[T]) -> None:
    """Cancel tasks and wait until they have ended.

    Nothing that they raise is raised here. What no one retrieves from a task (`task_error`), asyncio logs.
    """
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
    for task in tasks:
        if task.cancelled():
            task_error(task)


async def run_to_completion(coroutine: Coroutine[object, object, T]) -> T:
    """Await a coroutine; when cancelled meanwhile, let it finish first, then raise CancelledError.

    For engine calls and everything whose end others depend on: an engine may still be writing into a buffer
    or a reservation that the canceller is about to free.
    """
    task = asyncio.ensure_future(coroutine)
    cancelled = False
    try:
        while not task.done():
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError:
                cancelled = True
        if cancelled:
            task_error(task)
            raise asyncio.CancelledError
        return task.result()
    finally:
        del task


# Longest time in seconds for which work in slices keeps the event loop from other tasks, and for how many
# turns of the loop these then come first. A gRPC call takes eight or nine turns, and its thread needs the
# interpreter in between. With one turn between slices of 0.25 ms, a call to a server that has nothing else
# to do takes 2.5 to 3 ms of that server's time; with eight 0.4 to 1 ms (without slices 0.35 ms), and the work
# itself is as fast, since a turn without other tasks takes no time.
_SLICE_S: Final = 0.00025
_TURNS: Final = 8
# Seconds after which the work goes on before all turns: under overload it still has a third of the loop.
# Without that, reports at 1,024 instances were 6 s old while all placements were served.
_OTHERS_S: Final = 0.0005


async def in_slices(items: Iterable[T]) -> AsyncIterator[T]:
    """Yield the items; let other tasks run for some turns whenever the work on them has taken a slice of
    time.

    `items` must tolerate what other tasks do meanwhile.
    """
    began_s = time.monotonic()
    for item in items:
        yield item
        if time.monotonic() - began_s > _SLICE_S:
            others_s = time.monotonic() + _OTHERS_S
            for _ in range(_TURNS):
                await asyncio.sleep(0)
                began_s = time.monotonic()
                if began_s >= others_s:
                    break


def task_error(task: asyncio.Task[T]) -> BaseException | None:
    """Return the exception of a finished task; None if it returned or was cancelled. Also keeps asyncio from
    logging it, and a cancelled task from keeping the frames in which it was cancelled."""
    try:
        return task.exception()
    except asyncio.CancelledError:
        return None
