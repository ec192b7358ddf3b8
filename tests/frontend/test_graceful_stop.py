"""vLLM's launcher of its Python app with our middleware: SIGTERM lets responses finish."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator
from types import SimpleNamespace

import fastapi
import httpx
import pytest
from fastapi.responses import StreamingResponse

from frontend_svc.api_server.middleware import GracefulStop, Message, Receive, Send
from tests.waiting import WAIT_S

pytestmark = pytest.mark.vllm


async def test_sigterm_lets_responses_finish_before_the_server_exits() -> None:
    from vllm.entrypoints.launchers.launcher import serve_http

    app, resume = fastapi.FastAPI(), asyncio.Event()
    app.add_middleware(GracefulStop)
    app.state.engine_client = None

    async def words() -> AsyncIterator[str]:
        yield "before "
        await resume.wait()
        yield "after"

    @app.get("/stream")
    async def stream() -> StreamingResponse:
        return StreamingResponse(words())

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        serving = asyncio.create_task(serve_http(app, listening, host="127.0.0.1", port=0, log_level="error"))
        async with asyncio.timeout(WAIT_S), httpx.AsyncClient(base_url=url, timeout=WAIT_S) as client:
            while True:
                try:
                    response = await client.send(client.build_request("GET", "/stream"), stream=True)
                    break
                except httpx.ConnectError:
                    await asyncio.sleep(0.02)
            text = response.aiter_text()
            assert await anext(text) == "before "
            os.kill(os.getpid(), signal.SIGTERM)
            async with httpx.AsyncClient(base_url=url, timeout=WAIT_S) as other:
                with pytest.raises(httpx.ConnectError):
                    while True:
                        # The server closes connections that have no request yet.
                        with contextlib.suppress(httpx.RemoteProtocolError, httpx.ReadError):
                            await other.get("/nothing")
                        await asyncio.sleep(0.02)
            assert not serving.done()
            resume.set()
            assert await anext(text) == "after"
            await response.aclose()
            await (await serving)


async def test_a_connection_that_came_while_the_others_were_told_to_close_ends_with_its_response() -> None:
    sent: list[Message] = []

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def receive() -> Message:
        raise AssertionError("nothing is read")

    async def send(message: Message) -> None:
        sent.append(message)

    server = SimpleNamespace(should_exit=False)
    scope = {"type": "http", "app": SimpleNamespace(state=SimpleNamespace(server=server))}
    await GracefulStop(app)(scope, receive, send)
    server.should_exit = True
    await GracefulStop(app)(scope, receive, send)
    starts = [message["headers"] for message in sent if message["type"] == "http.response.start"]
    assert starts == [[], [(b"connection", b"close")]]
