"""A worker whose engine hangs exits soon, whatever the parts that it closes wait for."""

from __future__ import annotations

import asyncio
import sys

import pytest

from tests.waiting import WAIT_S

# The engine has a request to run and finishes no step. MODE says how it stops then.
_WORKER = """
import asyncio, sys, time
from dataclasses import replace
from tailrace.cluster import Phase
from tailrace.service import runtime
from worker_agent.engine.base import RequestStats
from worker_agent.engine import simulated

REQUEST = RequestStats("r", "f", 0, Phase.REASONING, "running", 10, 5, 5, 100, 1, 0.0, 10.0)
MODE = sys.argv.pop(1)
runtime._GRACE_S = 300.0 if MODE == "raises" else 1.0

class Hanging(simulated.SimulatedEngine):
    given_up = False

    def stats(self):
        return replace(super().stats(), requests=[REQUEST])

    def request_stats(self, request_ids):
        return []

    def fail(self, reason):
        self.given_up = True
        super().fail(reason)

    async def stop(self):
        assert self.given_up
        # As a copy from a device that hangs.
        asyncio.get_running_loop().run_in_executor(None, time.sleep, 3600)
        await asyncio.sleep(0.1)
        if MODE == "blocks":
            time.sleep(3600)
        if MODE == "waits":
            await asyncio.sleep(3600)
        raise TimeoutError("the engine thread did not end")

simulated.SimulatedEngine = Hanging
from tailrace.cli.main import main
main()
"""


@pytest.mark.parametrize(
    ("mode", "end"),
    [
        ("raises", "the engine thread did not end"),
        ("waits", "did not stop within"),
        ("blocks", "did not stop within"),
    ],
)
async def test_the_process_exits(etcd: str, cluster: str, mode: str, end: str) -> None:
    command = ["serve", "worker", "--engine", "simulated", "--etcd", etcd, "--cluster", cluster]
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-c", _WORKER, mode, *command, "--step-floor", "1", "--step-limit", "1"],
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(WAIT_S):
            log = (await process.communicate())[1].decode()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 1, log
    assert "the engine hangs" in log and end in log
