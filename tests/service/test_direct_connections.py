"""An operator's environment names a proxy for the world outside; processes of a fleet reach each other
directly."""

from __future__ import annotations

import asyncio

import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub
from prometheus_client import CollectorRegistry

from tailrace.security.roles import Role
from tailrace.security.transport import PLAIN
from tailrace.service.channels import Channels
from tailrace.service.probe import check_grpc, check_http
from tailrace.service.server import serve_grpc
from tailrace.telemetry.metrics import serve_metrics
from tests.harness.working_folder import UNREACHABLE_PROXY
from tests.waiting import WAIT_S


@pytest.fixture(autouse=True)
def proxied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name a proxy that does not answer."""
    for name, value in UNREACHABLE_PROXY.items():
        monkeypatch.setenv(name, value)


async def test_services_and_checks_connect_directly() -> None:
    channels = Channels()
    async with serve_grpc("127.0.0.1:0", []) as server:
        stub = HealthStub(channels.get(server.address, Role.WORKER))
        await stub.Check(HealthCheckRequest(), timeout=WAIT_S)
        await asyncio.to_thread(check_grpc, server.address, "", WAIT_S, PLAIN, Role.WORKER)
    await channels.close()


async def test_metrics_are_read_directly() -> None:
    async with serve_metrics("127.0.0.1:0", CollectorRegistry()) as server:
        await asyncio.to_thread(check_http, f"http://{server.address}/metrics", WAIT_S)
