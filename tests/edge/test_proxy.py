"""What the proxy does with WebSockets, and with answers that nobody reads: a real one, before a server of
the test."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h2.connection
import h2.events
import pytest
from aiohttp import ClientSession, web
from aiohttp.typedefs import Handler
from prometheus_client import CollectorRegistry

from edge_svc import configuration as edge_configuration
from edge_svc.configuration import DEFAULT_BOUNDS, bootstrap
from edge_svc.directory import directory
from edge_svc.main import envoy_path
from edge_svc.proxy import Proxy
from edge_svc.web import Answers
from tailrace.service.openai_error import NO_WEB_SOCKETS
from tests.edge.test_directory import front_end
from tests.ports import free_port
from tests.waiting import WAIT_S


@asynccontextmanager
async def proxied(
    folder: Path, path: str, handler: Handler, tcp_options: Sequence[tuple[int, int]] = ()
) -> AsyncIterator[int]:
    """Run a proxy before two models, of which the first one has a handler at a path; yield its port."""
    port, behind = free_port(), free_port()
    found = directory([front_end("f", "first", behind), front_end("g", "second", free_port())], [])
    answers = Answers(lambda: found, None, DEFAULT_BOUNDS, CollectorRegistry())
    own, model = web.AppRunner(answers.app()), web.Application()
    model.router.add_get(path, handler)
    server = web.AppRunner(model)
    try:
        for each in (own, server):
            await each.setup()
        await web.UnixSite(own, str(folder / "edge.sock")).start()
        await web.TCPSite(server, "127.0.0.1", behind).start()
        proxy = Proxy(envoy_path(None), folder, 1)
        proxy.route(found.clusters)
        configuration = bootstrap(
            f"127.0.0.1:{port}",
            folder,
            DEFAULT_BOUNDS,
            with_keys=False,
            https=False,
            tcp_options=tcp_options,
        )
        async with proxy.running(configuration):
            yield port
    finally:
        await own.cleanup()
        await server.cleanup()


def test_comments_of_certificates_may_have_any_encoding(tmp_path: Path) -> None:
    https: Any = SimpleNamespace(chain=b"# Z\xfcrich\n-----BEGIN", key=b"-----BEGIN")
    Proxy(tmp_path / "envoy", tmp_path, 1).present_to_users(https)
    assert any("rich" in file.read_text() for file in tmp_path.iterdir())


@pytest.mark.parametrize("path", ["/v1/realtime", "/v1/completions", "/health"])
async def test_web_sockets_are_refused_with_the_reason(tmp_path: Path, path: str) -> None:
    """What they carry would pass unread."""

    async def take(request: web.Request) -> web.WebSocketResponse:
        taken = web.WebSocketResponse()
        await taken.prepare(request)
        return taken

    asks = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
    async with proxied(tmp_path, path, take) as port, ClientSession() as client:
        url = f"http://127.0.0.1:{port}{path}"
        key = {"sec-websocket-key": "c3RyYW5nZXJzLWtleS0xMg=="}
        async with client.get(url, params={"model": "first"}, headers=asks | key) as refused:
            assert (refused.status, (await refused.json())["error"]["message"]) == (403, NO_WEB_SOCKETS)


async def test_an_answer_that_nobody_reads_is_not_kept_and_ends(tmp_path: Path) -> None:
    sent, ended = 0, asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            for _ in range(64):
                await response.write(bytes(1 << 20))
                sent += 1
        finally:
            ended.set()
        return response

    soon = [(socket.TCP_USER_TIMEOUT, 1_000)]
    async with proxied(tmp_path, "/v1/long", answer, soon) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 12)
        writer.write(b"GET /v1/long?model=first HTTP/1.1\r\nhost: edge\r\n\r\n")
        async with asyncio.timeout(WAIT_S):
            await ended.wait()
        writer.close()
    # What the kernel keeps on the way, and not the rest.
    assert sent < 40


async def test_a_whole_answer_that_an_http2_client_does_not_read_is_reset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads the connection, and so another answer, but leaves one stream's window closed."""
    monkeypatch.setattr(edge_configuration, "CLIENT_GIVE_UP_S", 0.5)
    size = 100_000

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=bytes(size))

    client = h2.connection.H2Connection()
    client.initiate_connection()
    client.increment_flow_control_window(1 << 20)
    unread, read = 1, 3
    taken, ended = 0, set[int]()
    async with proxied(tmp_path, "/v1/long", answer) as port, asyncio.timeout(WAIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        target = (":path", "/v1/long?model=first")
        head = [(":method", "GET"), target, (":scheme", "http"), (":authority", "edge")]
        for stream in (unread, read):
            client.send_headers(stream, head, end_stream=True)
        client.increment_flow_control_window(size, read)
        while ended != {unread, read}:
            writer.write(client.data_to_send())
            for event in client.receive_data(await reader.read(1 << 16)):
                if isinstance(event, h2.events.DataReceived) and event.stream_id == read:
                    taken += len(event.data)
                elif isinstance(event, h2.events.StreamEnded):
                    ended.add(event.stream_id)
                    assert event.stream_id == read
                elif isinstance(event, h2.events.StreamReset):
                    ended.add(event.stream_id)
                    assert event.stream_id == unread
        writer.close()
    assert taken == size


async def test_http_1_0_is_answered_also_without_a_host(tmp_path: Path) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text="whole")

    async with proxied(tmp_path, "/v1/answer", answer) as port:
        for host in ("", "host: edge\r\n"):
            for path, status in (("/v1/answer?model=first", b"200"), ("/health", b"200"), ("/none", b"404")):
                reply = await exchange(port, f"GET {path} HTTP/1.0\r\n{host}\r\n")
                assert reply.split()[1] == status, reply


async def test_too_many_headers_are_refused_whoever_counts_them(tmp_path: Path) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text="whole")

    found: dict[int, bytes] = {}
    async with proxied(tmp_path, "/v1/answer", answer) as port:
        for count in range(96, 116):
            fields = "".join(f"x-{n}: 1\r\n" for n in range(count - 1))
            request = (
                f"GET /v1/answer?model=first HTTP/1.1\r\nhost: edge\r\nconnection: close\r\n{fields}\r\n"
            )
            reply = found[count] = await exchange(port, request)
            assert reply.split()[1] == b"200" or (reply.split()[1] == b"431" and b"more than 100" in reply)
    assert [found[count].split()[1] for count in (99, 100, 112, 115)] == [b"200", b"200", b"431", b"431"]


async def exchange(port: int, request: str) -> bytes:
    """Send a request, after whose answer the connection ends; return the answer."""
    async with asyncio.timeout(WAIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(request.encode())
            return await reader.read()
        finally:
            writer.close()
