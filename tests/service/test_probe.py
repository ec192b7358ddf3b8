"""The health probe, against a real server."""

import asyncio
import sys

import pytest
from click.testing import CliRunner, Result
from prometheus_client import CollectorRegistry

from tailrace.service.probe import main
from tailrace.service.server import serve_grpc
from tailrace.telemetry.metrics import serve_metrics
from tests.waiting import WAIT_S


async def _probe(*arguments: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, main, ["--timeout", str(WAIT_S), *arguments])


async def test_the_probe_reports_the_health_check() -> None:
    async with serve_grpc("127.0.0.1:0", []) as server:
        assert (await _probe(server.address)).exit_code == 0
        await server.set_serving(False)
        result = await _probe(server.address)
    assert result.exit_code == 1
    assert "NOT_SERVING" in result.stderr


async def test_an_unknown_service_and_an_unreachable_one() -> None:
    async with serve_grpc("127.0.0.1:0", []) as server:
        unknown = await _probe(server.address, "--service", "tailrace.v1.Nothing")
        address = server.address
    unreachable = await _probe(address)
    assert (unknown.exit_code, unreachable.exit_code) == (1, 1)
    assert "NOT_FOUND" in unknown.stderr
    assert "UNAVAILABLE" in unreachable.stderr or "DEADLINE_EXCEEDED" in unreachable.stderr


@pytest.mark.parametrize(("path", "code"), [("http://{}/metrics", 0), ("http://127.0.0.1:1/", 1), ("x", 1)])
async def test_http_probe(path: str, code: int) -> None:
    async with (
        serve_grpc("127.0.0.1:0", []) as server,
        serve_metrics("127.0.0.1:0", CollectorRegistry()) as web,
    ):
        result = await _probe(server.address, "--http", path.format(web.address))
    assert result.exit_code == code


async def test_the_probe_runs_as_a_module() -> None:
    async with serve_grpc("127.0.0.1:0", []) as server:
        probe = [sys.executable, "-m", "tailrace.service.probe"]
        command = [*probe, "--timeout", str(WAIT_S), server.address]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        stdout, _ = await asyncio.wait_for(process.communicate(), WAIT_S)
    assert (process.returncode, stdout) == (0, b"healthy\n")
