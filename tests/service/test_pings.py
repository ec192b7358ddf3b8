"""Calls end when the other end of a connection stops answering, as a stopped process does."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from tailrace.service.pings import ping_options
from tailrace.service.server import serve_grpc
from tests.service.silent_proxy import silent_proxy
from tests.waiting import WAIT_S


async def test_stream_to_a_peer_that_does_not_answer_ends() -> None:
    """Not by its deadline, which is sooner than the minute for which gRPC waits if not told otherwise."""
    async with (
        serve_grpc("127.0.0.1:0", []) as server,
        silent_proxy(server.address) as proxy,
        grpc.aio.insecure_channel(proxy.address, options=ping_options(1.0, 1.0)) as channel,
    ):
        # On a busy machine a ping of a second can go unanswered before.
        async with asyncio.timeout(WAIT_S):
            while True:
                watched = HealthStub(channel).Watch(HealthCheckRequest(), timeout=45)
                with contextlib.suppress(grpc.aio.AioRpcError):
                    assert (await watched.read()).status == HealthCheckResponse.SERVING
                    break
        proxy.open.clear()
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await watched.read()
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
