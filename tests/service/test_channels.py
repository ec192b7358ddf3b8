"""Channels to members that have left are closed."""

from __future__ import annotations

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub

from tailrace.security.roles import Role
from tailrace.service.channels import Channels
from tailrace.service.server import serve_grpc
from tests.waiting import WAIT_S
from worker_agent.prefixes import PromptUnknown, prompt_of

HOUR_S = 3600.0


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def test_unused_channels_are_closed_and_connected_ones_kept() -> None:
    clock = Clock()
    channels = Channels(clock=clock)
    async with serve_grpc("127.0.0.1:0", []) as server:
        live = channels.get(server.address, Role.WORKER)
        await HealthStub(live).Check(HealthCheckRequest(), timeout=WAIT_S)
        gone = channels.get("127.0.0.1:1", Role.WORKER)
        assert channels.get("127.0.0.1:1", Role.WORKER) is gone and len(channels) == 2
        clock.now_s += HOUR_S
        channels.get("127.0.0.1:2", Role.WORKER)
        assert len(channels) == 2
        assert channels.get(server.address, Role.WORKER) is live
        await HealthStub(live).Check(HealthCheckRequest(), timeout=WAIT_S)
    await channels.close()
    assert len(channels) == 0


async def test_recently_used_channels_are_kept() -> None:
    channels = Channels(clock=Clock())
    kept = [channels.get(f"127.0.0.1:{port}", Role.WORKER) for port in range(1, 5)]
    assert [channels.get(f"127.0.0.1:{port}", Role.WORKER) for port in range(1, 5)] == kept
    await channels.close()


@pytest.mark.parametrize("reply", [b"\x0f", b""], ids=["undecodable", "empty"])
async def test_undecodable_reply_is_an_error_of_the_call(
    reply: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """grpc.aio itself returns None for it."""
    monkeypatch.setattr("worker_agent.prefixes._PROMPT_S", WAIT_S)

    async def prompt(request: object, context: object) -> bytes:
        return reply

    server = grpc.aio.server()
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(prompt)
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("tailrace.v1.Cache", {"Prompt": handler})]
    )
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    channels = Channels()
    try:
        if reply:
            with pytest.raises(PromptUnknown, match="cannot be decoded"):
                await prompt_of(channels, address, "r")
        else:
            assert await prompt_of(channels, address, "r") == []
    finally:
        await channels.close()
        await server.stop(None)
