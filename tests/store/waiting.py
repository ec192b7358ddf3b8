"""Waiting for watches and membership."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from tailrace.store.membership import Membership
from tests.waiting import WAIT_S


async def until(watch: AsyncGenerator[dict[str, bytes]], wanted: Callable[[dict[str, bytes]], bool]) -> None:
    """Read a watch until its mapping satisfies `wanted`."""
    async with asyncio.timeout(WAIT_S):
        async for mapping in watch:
            if wanted(mapping):
                return
    raise AssertionError("the watch ended")


async def wait_for_members(membership: Membership, wanted: Callable[[], bool]) -> None:
    """Wait until `wanted` returns true after a change of the membership."""
    changed = asyncio.Event()
    membership.add_listener(changed.set)
    async with asyncio.timeout(WAIT_S):
        while not wanted():
            changed.clear()
            await changed.wait()
