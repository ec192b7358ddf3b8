"""Tasks that end together, and work that a cancellation does not interrupt."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TypeVar


async def first_ended(*works: Coroutine[object, object, None]) -> None:
    """Run them together; when one ends, cancel the others, and raise what it raised.

    Unlike asyncio.TaskGroup of Python 3.11 and 3.12, this never swallows a cancellation of its caller,
    and leaves no trace in the caller's `cancelling()` when one of them fails: whether the caller was
    cancelled is told by CancelledError alone.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for task, result in zip(tasks, results, strict=True):
        if task in done and isinstance(result, BaseException):
            raise result


T = TypeVar("T")


async def run_to_completion(work: Coroutine[object, object, T]) -> T:
    """Await `work`; when cancelled meanwhile, first let it end, then pass the cancellation on.

    For calls to the engine and everything that others must see done: an engine may still be writing into a
    buffer or a reservation that the canceller is about to free.
    """
    task = asyncio.ensure_future(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        if not task.cancelled():
            # Looked at, so that nobody is told of it as unretrieved.
            task.exception()
        raise asyncio.CancelledError
    return task.result()


def task_error(task: asyncio.Task[None]) -> BaseException | None:
    """Of a task that is done; None: it returned, or was cancelled. To look is what keeps asyncio quiet."""
    return None if task.cancelled() else task.exception()
