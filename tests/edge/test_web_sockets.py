"""A web socket goes to the model that its query names: a real proxy, before a server of the test."""

from __future__ import annotations

from pathlib import Path

import pytest
from aiohttp import ClientSession, WSServerHandshakeError, web
from prometheus_client import CollectorRegistry

from edge_svc.configuration import DEFAULT_BOUNDS, bootstrap
from edge_svc.directory import directory
from edge_svc.main import envoy_path
from edge_svc.proxy import Proxy
from edge_svc.web import Answers
from tests.edge.test_directory import front_end
from tests.ports import free_port


async def echo(request: web.Request) -> web.WebSocketResponse:
    """Send each message back."""
    socket = web.WebSocketResponse()
    await socket.prepare(request)
    async for message in socket:
        await socket.send_str(f"echo {message.data}")
    return socket


async def test_a_web_socket_reaches_its_model(tmp_path: Path) -> None:
    port, behind = free_port(), free_port()
    found = directory([front_end("f", "first", behind), front_end("g", "second", free_port())], [])
    answers = Answers(lambda: found, None, DEFAULT_BOUNDS, CollectorRegistry())
    own, model = web.AppRunner(answers.app()), web.Application()
    model.router.add_get("/v1/realtime", echo)
    server = web.AppRunner(model)
    try:
        for each in (own, server):
            await each.setup()
        await web.UnixSite(own, str(tmp_path / "edge.sock")).start()
        await web.TCPSite(server, "127.0.0.1", behind).start()
        proxy = Proxy(envoy_path(None), tmp_path, 1)
        proxy.route(found.clusters)
        listen = f"127.0.0.1:{port}"
        configuration = bootstrap(listen, tmp_path, DEFAULT_BOUNDS, with_keys=False, certificate=None)
        async with proxy.running(configuration), ClientSession() as client:
            url = f"http://{listen}/v1/realtime"
            async with client.ws_connect(url, params={"model": "first"}) as socket:
                await socket.send_str("hello")
                assert await socket.receive_str() == "echo hello"
            with pytest.raises(WSServerHandshakeError) as refused:
                await client.ws_connect(url)
            assert refused.value.status == 400
    finally:
        await own.cleanup()
        await server.cleanup()
