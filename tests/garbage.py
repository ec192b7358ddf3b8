"""What a piece of work leaves behind that only a garbage collection would free."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

_OURS = ("frontend_svc", "migration_svc", "monitor_svc", "scheduler_svc", "tailrace", "worker_agent")


@contextmanager
def only_counted() -> Iterator[Counter[str]]:
    """Yield a counter; after the block it has, by type, what was dropped in it and not freed at once.

    Types of this repository, tasks, and exceptions: each of them may hold buffers, mappings and streams.
    """
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    left: Counter[str] = Counter()
    try:
        yield left
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left.update(name for each in gc.garbage if (name := _name(each)))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        if enabled:
            gc.enable()


def _name(each: object) -> str:
    kind = type(each)
    if isinstance(each, asyncio.Task | BaseException):
        return f"{kind.__name__}: {each!r}"[:200]
    return kind.__qualname__ if kind.__module__.partition(".")[0] in _OURS else ""
