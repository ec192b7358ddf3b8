"""What ended a task that nobody awaits."""

from __future__ import annotations

import asyncio


def failure(task: asyncio.Task[None]) -> BaseException | None:
    """Of a task that is done; None: it returned, or was cancelled. To look is what keeps asyncio quiet."""
    return None if task.cancelled() else task.exception()
