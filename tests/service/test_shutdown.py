"""Shutdown of a service process: on the first signal, on the second, and while starting."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.waiting import WAIT_S

# A service that prints its state; MODE selects the behaviour of its drain.
SERVICE = """
import asyncio, sys
from tailrace.service.runtime import run_service

MODE = sys.argv[1]

def say(word):
    print(word, flush=True)

async def drain():
    say("draining")
    if MODE.startswith("hangs"):
        await asyncio.sleep(3600)
    if MODE == "fails":
        raise RuntimeError("broken drain")
    if MODE == "slow":
        await asyncio.sleep(0.05)
    say("drained")

async def main(shutdown):
    try:
        if MODE == "starting":
            say("starting")
            await asyncio.sleep(3600)
        with shutdown.draining(drain, 0.2 if MODE == "hangs-bounded" else 60):
            say("serving")
            await asyncio.sleep(3600)
    finally:
        say("closed")

run_service(main)
"""


class Service:
    """A service process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    async def line(self) -> str:
        assert self._process.stdout is not None
        async with asyncio.timeout(WAIT_S):
            return (await self._process.stdout.readline()).decode().strip()

    async def wait(self) -> tuple[list[str], str, int | None]:
        """Return the remaining output lines, the log and the exit code."""
        async with asyncio.timeout(WAIT_S):
            out, err = await self._process.communicate()
        return out.decode().split(), err.decode(), self._process.returncode


@asynccontextmanager
async def service(mode: str) -> AsyncIterator[Service]:
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-c", SERVICE, mode],
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield Service(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_first_signal_drains_before_closing(number: signal.Signals) -> None:
    async with service("slow") as running:
        assert await running.line() == "serving"
        running.signal(number)
        assert (await running.wait())[::2] == (["draining", "drained", "closed"], 0)


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_ends_the_drain(second: signal.Signals) -> None:
    async with service("hangs") as running:
        assert await running.line() == "serving"
        running.signal(signal.SIGTERM)
        assert await running.line() == "draining"
        running.signal(second)
        lines, log, code = await running.wait()
    assert (lines, code) == (["closed"], 0)
    assert "without draining" in log


async def test_a_starting_service_does_not_drain() -> None:
    async with service("starting") as running:
        assert await running.line() == "starting"
        running.signal(signal.SIGTERM)
        assert (await running.wait())[::2] == (["closed"], 0)


async def test_a_drain_has_a_timeout() -> None:
    async with service("hangs-bounded") as running:
        assert await running.line() == "serving"
        running.signal(signal.SIGTERM)
        lines, log, code = await running.wait()
    assert (lines, code) == (["draining", "closed"], 0)
    assert "not drained within 0.2 s" in log


async def test_a_failed_drain_is_logged_and_the_service_ends() -> None:
    async with service("fails") as running:
        assert await running.line() == "serving"
        running.signal(signal.SIGTERM)
        lines, log, code = await running.wait()
    assert (lines, code) == (["draining", "closed"], 0)
    assert "broken drain" in log
