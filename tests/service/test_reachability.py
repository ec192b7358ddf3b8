"""Tracking of which services can be reached."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from tailrace.security.roles import Role
from tailrace.service.channels import Channels
from tailrace.service.reachability import Reachability, is_serving
from tailrace.service.server import serve_grpc
from tests.waiting import WAIT_S


class Checks:
    """Scripted health checks."""

    def __init__(self) -> None:
        self.serving = False
        self.calls = 0
        self._changed = asyncio.Event()

    async def __call__(self, channel: grpc.aio.Channel) -> bool:
        self.calls += 1
        self._changed.set()
        return self.serving

    async def wait_for_call(self) -> None:
        """Wait for the next call."""
        self._changed.clear()
        async with asyncio.timeout(WAIT_S):
            await self._changed.wait()


@pytest.fixture
async def channels() -> AsyncIterator[Channels]:
    channels = Channels()
    yield channels
    await channels.close()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no health check fail because this machine is busy."""
    monkeypatch.setattr("tailrace.service.reachability._CHECK_S", WAIT_S)


async def wait_until_usable(reachability: Reachability, address: str) -> None:
    """Wait until the address is usable; there is no notification."""
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
    await checks.wait_for_call()
    await checks.wait_for_call()
    assert not reachability.usable("a:1")
    checks.serving = True
    await wait_until_usable(reachability, "a:1")
    await reachability.close()


async def test_pauses_grow_for_a_service_that_is_healthy_but_fails(channels: Channels) -> None:
    """If health checks succeed but calls fail, the pauses double."""
    checks = Checks()
    checks.serving = True
    reachability = Reachability(channels, Role.WORKER, checks, pause_s=0.02)
    loop = asyncio.get_running_loop()
    pauses = []
    for _ in range(4):
        reachability.failed("a:1")
        began_s = loop.time()
        await wait_until_usable(reachability, "a:1")
        pauses.append(loop.time() - began_s)
    assert pauses[3] > 0.16, "eight times the first pause"
    reachability.succeeded("a:1")
    reachability.failed("a:1")
    assert reachability._failures == {"a:1": 1}
    await reachability.close()


async def test_removed_addresses_are_no_longer_checked(channels: Channels) -> None:
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


async def test_a_service_without_a_health_check_is_reachable(channels: Channels) -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    assert await is_serving(channels.get(f"127.0.0.1:{port}", Role.WORKER))
    await server.stop(None)
