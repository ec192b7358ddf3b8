"""Wait for what a watch brings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from tailrace.store.membership import Membership


async def until(watch: AsyncGenerator[dict[str, bytes]], wanted: Callable[[dict[str, bytes]], bool]) -> None:
    """Read a watch until a mapping is as wanted."""
    async with asyncio.timeout(20):
        async for mapping in watch:
            if wanted(mapping):
                return
    raise AssertionError("the watch ended")


async def member_state(membership: Membership, wanted: Callable[[], bool]) -> None:
    """Wait until the membership is as wanted."""
    changed = asyncio.Event()
    membership.add_listener(changed.set)
    async with asyncio.timeout(20):
        while not wanted():
            changed.clear()
            await changed.wait()
