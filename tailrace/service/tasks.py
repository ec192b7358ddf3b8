"""Run tasks that end together, cancel tasks, and run work that must not be interrupted, or in slices."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Iterable
from typing import Final, TypeVar

T = TypeVar("T")


async def first_ended(*coroutines: Coroutine[object, object, None]) -> None:
    """Run coroutines together; when one ends, cancel the others, and raise what it raised.

    Unlike asyncio.TaskGroup of Python 3.11 and 3.12, this never swallows a cancellation of its caller, and
    leaves no trace in the caller's `cancelling()` when a coroutine fails: CancelledError alone says whether
    the caller was cancelled.
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for task, result in zip(tasks, results, strict=True):
        if task in done and isinstance(result, BaseException):
            raise result


async def cancel(*tasks: asyncio.Task[T]) -> None:
    """Cancel tasks and wait until they have ended.

    Nothing that they raise is raised here. What no one retrieves from a task (`task_error`), asyncio logs.
    """
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)


async def run_to_completion(coroutine: Coroutine[object, object, T]) -> T:
    """Await a coroutine; when cancelled meanwhile, let it finish first, then raise CancelledError.

    For engine calls and everything whose end others depend on: an engine may still be writing into a buffer
    or a reservation that the canceller is about to free.
    """
    task = asyncio.ensure_future(coroutine)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        if not task.cancelled():
            # Retrieved, so that asyncio does not log it.
            task.exception()
        raise asyncio.CancelledError
    try:
        return task.result()
    finally:
        # An exception keeps the frames that it passed, this one and with it the task, and the task keeps the
        # exception: a circle that would hold buffers and file descriptors until the next collection.
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


def task_error(task: asyncio.Task[None]) -> BaseException | None:
    """Return the exception of a finished task; None if it returned or was cancelled. Also keeps asyncio from
    logging it."""
    return None if task.cancelled() else task.exception()
