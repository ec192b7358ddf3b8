"""Run several tasks that belong together until the first one ends."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine


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
