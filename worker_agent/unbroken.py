"""Work that must come to its end once begun."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

T = TypeVar("T")


async def unbroken(work: Coroutine[object, object, T]) -> T:
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
