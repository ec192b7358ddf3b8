"""Requests for a front end that is asleep."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from edge_svc.directory import Directory, directory
from edge_svc.waking import Waker
from tailrace.records import ServiceRecord
from tests.edge.test_directory import front_end
from tests.ports import free_port
from tests.waiting import WAIT_S


class Following:
    """A directory that changes by hand."""

    def __init__(self, *front_ends: ServiceRecord) -> None:
        self.directory = Directory({}, ())
        self.changed = asyncio.Event()
        self.follow(*front_ends)

    def follow(self, *front_ends: ServiceRecord) -> None:
        self.directory = directory(front_ends, [])
        self.changed.set()
        self.changed = asyncio.Event()


@asynccontextmanager
async def knocked() -> AsyncIterator[tuple[int, asyncio.Event]]:
    """Listen; yield the port, and an event of the first connection."""
    came = asyncio.Event()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.set()
        writer.close()

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1], came


async def test_a_request_is_held_until_the_api_server_answers() -> None:
    async with asyncio.timeout(WAIT_S), knocked() as (port, came):
        following = Following(front_end("f0", "chat", port, asleep=True))
        cluster = following.directory.names["chat"].python
        waker = Waker(following, WAIT_S)
        held = asyncio.create_task(waker.wake(cluster))
        await came.wait()
        # Another front end: nothing of this one.
        following.follow(front_end("f0", "chat", port, asleep=True), front_end("f1", "chat", 2, "rust"))
        await asyncio.sleep(0)
        assert not held.done()
        following.follow(front_end("f0", "chat", port))
        assert await held
        assert await waker.wake(cluster)


async def test_a_request_is_held_for_a_bounded_time() -> None:
    async with asyncio.timeout(WAIT_S), knocked() as (port, _):
        following = Following(front_end("f0", "chat", port, asleep=True))
        assert not await Waker(following, 0.05).wake(following.directory.names["chat"].python)


async def test_a_front_end_that_has_gone() -> None:
    following = Following(front_end("f0", "chat", free_port(), asleep=True))
    cluster = following.directory.names["chat"].python
    held = asyncio.create_task(Waker(following, WAIT_S).wake(cluster))
    await asyncio.sleep(0)
    following.follow(front_end("f1", "chat", 2, "rust"))
    async with asyncio.timeout(WAIT_S):
        assert not await held


async def test_only_so_many_requests_are_held() -> None:
    async with asyncio.timeout(WAIT_S), knocked() as (port, came):
        following = Following(front_end("f0", "chat", port, asleep=True))
        cluster = following.directory.names["chat"].python
        waker = Waker(following, WAIT_S)
        held = [asyncio.create_task(waker.wake(cluster)) for _ in range(64)]
        await came.wait()
        assert not await waker.wake(cluster)
        following.follow(front_end("f0", "chat", port))
        assert all(await asyncio.gather(*held))
