"""Discard unexpected UCX messages.

Every receive is posted before its message is requested, and no tag is used twice, so an unexpected message
is late or comes from a sender without a ticket. UCX stores such messages until they are received; they are
received here and dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

import numpy as np
import ucxx
from ucxx._lib.arr import Array
from ucxx.types import Tag, TagMask

from tailrace.service.tasks import cancel, supervise
from worker_agent.kv.progress import progress_paused

log = logging.getLogger(__name__)

_SWEEP_S: Final = 0.5
# Maximum messages per call, so that a flood does not block the event loop.
_BATCH_MAX: Final = 256
_RECEIVE_S: Final = 5.0
# One receive buffer for all of them: its content is never read.
_SINK: Final = Array(np.zeros(1, np.uint8))


@asynccontextmanager
async def discarding_strays(count: Callable[[int], None]) -> AsyncIterator[None]:
    """Discard unexpected messages while the block runs, and `count` them. UCX must be started."""
    task = supervise("stray KV messages", partial(_sweep, count))
    try:
        yield
    finally:
        await cancel(task)


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
    """Discard at most _BATCH_MAX of the messages received so far; return their number."""
    worker = ucxx.core._get_ctx().worker
    for dropped in range(_BATCH_MAX):
        # Any tag.
        with progress_paused():
            message = worker.tag_probe(Tag(0), TagMask(0), remove=True)
        if not message.matched:
            return dropped
        # Receiving into a buffer that is too small completes the message as truncated, also for its sender.
        # If the sender is gone, the receive is cancelled.
        request = worker.tag_recv_with_handle(_SINK, message)
        try:
            async with asyncio.timeout(_RECEIVE_S):
                await request.wait()
        except ucxx.exceptions.UCXError as error:
            # The request keeps it, and its frames have the request: see transport.py.
            error.__traceback__ = None
    return _BATCH_MAX
