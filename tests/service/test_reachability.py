"""Which services can be reached."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from tailrace.security.roles import Role
from tailrace.service.channels import Channels
from tailrace.service.reachability import Reachability, is_serving
from tailrace.service.server import serve_grpc

WAIT_S = 10.0


class Checks:
    """Health checks as a test says."""

    def __init__(self) -> None:
        self.serving = False
        self.asked = 0
        self._changed = asyncio.Event()

    async def __call__(self, channel: grpc.aio.Channel) -> bool:
        self.asked += 1
        self._changed.set()
        return self.serving

    async def asked_again(self) -> None:
        """Until it was asked once more."""
        self._changed.clear()
        async with asyncio.timeout(WAIT_S):
            await self._changed.wait()


@pytest.fixture
async def channels() -> AsyncIterator[Channels]:
    channels = Channels()
    yield channels
    await channels.close()


async def until_usable(reachability: Reachability, address: str) -> None:
    """Nobody is told of it."""
    async with asyncio.timeout(WAIT_S):
        while not reachability.usable(address):  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_an_address_that_failed_is_usable_once_it_serves(channels: Channels) -> None:
    checks = Checks()
    reachability = Reachability(channels, Role.WORKER, checks, pause_s=0.001)
    assert reachability.usable("a:1")
    reachability.failed("a:1")
    reachability.failed("a:1")
    assert not reachability.usable("a:1") and reachability.usable("b:1")
    await checks.asked_again()
    await checks.asked_again()
    assert not reachability.usable("a:1")
    checks.serving = True
    await until_usable(reachability, "a:1")
    await reachability.close()


async def test_one_that_only_says_that_it_serves_is_left_alone_for_longer(channels: Channels) -> None:
    """Its health check answers at once, its calls fail: the pauses double."""
    checks = Checks()
    checks.serving = True
    reachability = Reachability(channels, Role.WORKER, checks, pause_s=0.02)
    loop = asyncio.get_running_loop()
    pauses = []
    for _ in range(4):
        reachability.failed("a:1")
        began_s = loop.time()
        await until_usable(reachability, "a:1")
        pauses.append(loop.time() - began_s)
    assert pauses[3] > 0.16, "eight times the first pause"
    reachability.succeeded("a:1")
    reachability.failed("a:1")
    assert reachability._failures == {"a:1": 1}
    await reachability.close()


async def test_who_has_left_is_not_asked_for_ever(channels: Channels) -> None:
    checks = Checks()
    reachability = Reachability(channels, Role.WORKER, checks, pause_s=0.001)
    reachability.failed("a:1")
    reachability.failed("b:1")
    reachability.keep_only(["b:1"])
    assert reachability.usable("a:1") and not reachability.usable("b:1")
    await reachability.close()
    assert not reachability._cancelled


async def test_the_standard_health_check(channels: Channels) -> None:
    async with serve_grpc("127.0.0.1:0", []) as server:
        assert await is_serving(channels.get(server.address, Role.WORKER))
        await server.set_serving(False)
        assert not await is_serving(channels.get(server.address, Role.WORKER))
    assert not await is_serving(channels.get("127.0.0.1:1", Role.WORKER))


async def test_a_service_without_a_health_check_is_there(channels: Channels) -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    assert await is_serving(channels.get(f"127.0.0.1:{port}", Role.WORKER))
    await server.stop(None)
