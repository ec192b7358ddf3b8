"""Messages that nobody waits for.

Every receive of ours is posted before its message is asked for, and no tag is used twice: a message that
nobody expects came too late, or from somebody who has no ticket. UCX keeps such messages until they are
received, so they are taken out and dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

import numpy as np
import ucxx
from ucxx._lib.arr import Array
from ucxx.types import Tag, TagMask

log = logging.getLogger(__name__)

_SWEEP_S: Final = 0.5
# In one go, so that a flood does not hold up the event loop.
_AT_A_TIME: Final = 256
_RECEIVE_S: Final = 5.0
# For all of them and for ever: nobody reads it.
_NO_ROOM: Final = Array(np.zeros(1, np.uint8))


@asynccontextmanager
async def discarding_strays(count: Callable[[int], None]) -> AsyncIterator[None]:
    """Drop messages that nobody waits for while the block runs, and `count` them. UCX must be started."""
    task = asyncio.create_task(_sweep(count), name="stray KV messages")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _sweep(count: Callable[[int], None]) -> None:
    while True:
        await asyncio.sleep(_SWEEP_S)
        try:
            while dropped := await discard_strays():
                count(dropped)
                log.info("dropped %d unexpected KV messages", dropped)
        except TimeoutError:
            log.warning("an unexpected KV message cannot be dropped")


async def discard_strays() -> int:
    """Drop some of those that are here now; how many."""
    worker = ucxx.core._get_ctx().worker
    for dropped in range(_AT_A_TIME):
        # Any tag.
        found = worker.tag_probe(Tag(0), TagMask(0), remove=True)
        if not found.matched:
            return dropped
        # Received into next to no room: UCX takes it for truncated, and has done with it and its sender. Or
        # the sender has gone, and it is cancelled.
        request = worker.tag_recv_with_handle(_NO_ROOM, found)
        with contextlib.suppress(ucxx.exceptions.UCXError):
            async with asyncio.timeout(_RECEIVE_S):
                await request.wait()
    return _AT_A_TIME
