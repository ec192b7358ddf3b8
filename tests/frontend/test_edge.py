"""Bounds on what clients send to vLLM's Python app: connections without a header, headers, ids, bodies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus

import httpx
import pytest
import uvicorn

from frontend_svc.api_server.edge import CheckRequest
from frontend_svc.api_server.http_protocol import BoundedProtocol
from frontend_svc.api_server.middleware import Message, Receive, Send, send_error
from frontend_svc.api_server.spec import ConnectionLimits
from frontend_svc.api_server.tenants import read_body
from tailrace.request_ids import MAX_BYTES
from tailrace.service.openai_error import NO_WEB_SOCKETS
from tailrace.tenancy.body import MAX_NESTING, problem_with_body
from tests.waiting import WAIT_S


async def echo(scope: Message, receive: Receive, send: Send) -> None:
    """Answer with the body's size; a GET at once, without reading."""
    assert scope["type"] == "http"
    if scope["path"] == "/fails":
        await send_error(send, HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError", "no reason")
        raise ZeroDivisionError
    size = 0 if scope["method"] == "GET" else len(await read_body(receive, 1 << 20) or b"")
    body = json.dumps({"size": size}).encode()
    fields = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": fields})
    await send({"type": "http.response.body", "body": body})


class Connection:
    """A client that sends raw bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def response(self) -> tuple[int, dict[str, object]]:
        """Return status and body of the next response."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        body: dict[str, object] = json.loads(await self.reader.readexactly(length))
        return int(head.split(b" ", 2)[1]), body

    async def refusal(self) -> tuple[int, str]:
        """Return status and message of an error in OpenAI's format, after which the connection ends."""
        status, body = await self.response()
        error = body["error"]
        assert isinstance(error, dict) and error["code"] == status
        assert await self.reader.read() == b""
        return status, str(error["message"])


class Server:
    """uvicorn with our protocol."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.connections: list[Connection] = []

    async def connect(self) -> Connection:
        connection = Connection(*await asyncio.open_connection("127.0.0.1", self.port))
        self.connections.append(connection)
        return connection

    async def connect_and_shorten(self, monkeypatch: pytest.MonkeyPatch) -> Connection:
        """Connect; give headers and unread bodies that come from then on a tenth of a second.

        The time for the header of a first request begins with the connection: a busy machine may take longer
        until that has been sent.
        """
        connection = await self.connect()
        async with asyncio.timeout(WAIT_S):
            while not BoundedProtocol.pending and not connection.reader.at_eof():  # noqa: ASYNC110
                await asyncio.sleep(0)
        monkeypatch.setattr(BoundedProtocol, "limits", ConnectionLimits(0.1, 100))
        return connection


@asynccontextmanager
async def serving(
    monkeypatch: pytest.MonkeyPatch, header_timeout_s: float = WAIT_S, max_pending: int = 100
) -> AsyncIterator[Server]:
    monkeypatch.setattr(BoundedProtocol, "limits", ConnectionLimits(header_timeout_s, max_pending))
    monkeypatch.setattr(BoundedProtocol, "max_header_bytes", 4096)
    monkeypatch.setattr(BoundedProtocol, "max_header_fields", 20)
    monkeypatch.setattr(BoundedProtocol, "pending", {})
    monkeypatch.setattr(BoundedProtocol, "idle", {})
    config = uvicorn.Config(
        echo, port=0, http=BoundedProtocol, lifespan="off", log_level="error", timeout_keep_alive=30
    )
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    running = Server(server.servers[0].sockets[0].getsockname()[1])
    try:
        yield running
    finally:
        for connection in running.connections:
            connection.writer.close()
        await server.shutdown()


async def test_a_failed_request_leaves_its_connection_to_the_next_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(monkeypatch) as server, asyncio.timeout(WAIT_S):
        connection = await server.connect()
        # As a proxy may, the second one before the first one's failure is over.
        connection.send(GET.replace(b"/ ", b"/fails ") + b"\r\n")
        assert (await connection.response())[0] == 500
        connection.send(GET + b"\r\n")
        assert await connection.response() == (200, {"size": 0})
    assert "request (/fails) failed; it goes on: " in caplog.text and "ZeroDivisionError" in caplog.text


GET = b"GET / HTTP/1.1\r\nhost: a\r\n"
TOO_LARGE = "The request line and header fields may have at most 4096 bytes in all."


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (GET + b"".join(b"x-%d: %b\r\n" % (i, b"v" * 900) for i in range(5)) + b"\r\n", TOO_LARGE),
        (GET + b"x: " + b"v" * 1025 + b"\r\n\r\n", "A header field may have at most 1024 bytes."),
        (GET + b"x: 1\r\n" * 20 + b"\r\n", "A request may have at most 20 header fields."),
        # Without an end, and none of it parsed.
        (b"GET /" + b"u" * 5000, TOO_LARGE),
        (GET + b"x: " + b"v" * 500_000, TOO_LARGE),
    ],
    ids=["all", "one", "number", "url", "unfinished"],
)
async def test_large_header_is_refused(monkeypatch: pytest.MonkeyPatch, header: bytes, reason: str) -> None:
    async with serving(monkeypatch) as server:
        connection = await server.connect()
        connection.send(header)
        assert await connection.refusal() == (431, reason)
        # Others, and later requests of usual size on one connection, are served.
        connection = await server.connect()
        for _ in range(3):
            connection.send(GET + b"x: 1\r\n" * 18 + b"x: " + b"v" * 900 + b"\r\n\r\n")
            assert await connection.response() == (200, {"size": 0})


async def test_a_large_body_is_no_header(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(monkeypatch) as server:
        connection = await server.connect()
        for head, body in (
            (b"content-length: 500000\r\n\r\n", b"b" * 500_000),
            (b"transfer-encoding: chunked\r\n\r\n", b"1\r\nb\r\n" * 5000 + b"0\r\n\r\n"),
        ):
            connection.send(b"POST / HTTP/1.1\r\nhost: a\r\n" + head + body)
            assert (await connection.response())[0] == 200


@pytest.mark.parametrize(
    "trailer", [b"x: " + b"v" * 1_000_000, b"x: 1\r\n" * 30 + b"\r\n"], ids=["bytes", "fields"]
)
async def test_what_follows_a_chunked_body_is_bounded(
    monkeypatch: pytest.MonkeyPatch, trailer: bytes
) -> None:
    async with serving(monkeypatch) as server:
        connection = await server.connect()
        connection.send(
            b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n1\r\nb\r\n0\r\n" + trailer
        )
        assert (await connection.response())[0] == 431


@pytest.mark.parametrize(
    ("sent", "status"),
    [(b"", 0), (b"GET /", 408), (GET + b"x:", 408)],
    ids=["nothing", "line", "header"],
)
async def test_late_header_ends_the_connection(
    monkeypatch: pytest.MonkeyPatch, sent: bytes, status: int
) -> None:
    async with serving(monkeypatch, WAIT_S if sent else 0.1) as server:
        connection = await server.connect_and_shorten(monkeypatch)
        connection.send(sent)
        if status:
            assert await connection.refusal() == (408, "The header was not complete within 0.1 s.")
        else:
            assert await connection.reader.read() == b""


async def test_late_header_of_a_second_request_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(monkeypatch) as server:
        connection = await server.connect_and_shorten(monkeypatch)
        connection.send(GET + b"\r\n")
        assert (await connection.response())[0] == 200
        connection.send(b"GET /")
        assert (await connection.refusal())[0] == 408


async def test_body_that_nobody_reads_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(monkeypatch) as server:
        connection = await server.connect_and_shorten(monkeypatch)
        # Answered at once; the client goes on with its body, as one without a key could for ever.
        connection.send(GET + b"content-length: 1000\r\n\r\nb")
        assert (await connection.response())[0] == 200
        assert await connection.reader.read() == b""


async def test_connection_that_was_answered_before_its_body_does_not_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving(monkeypatch) as server:
        connection = await server.connect_and_shorten(monkeypatch)
        connection.send(GET + b"content-length: 1\r\n\r\n")
        assert (await connection.response())[0] == 200
        connection.send(b"b")
        # On a busy machine it may have ended before that byte, which then resets it.
        with suppress(ConnectionResetError):
            assert await connection.reader.read() == b""


async def test_oldest_connection_without_a_header_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(monkeypatch, max_pending=3) as server:
        waiting = []
        for _ in range(3):
            connection = await server.connect()
            connection.send(b"GET /")
            waiting.append(connection)
            while len(BoundedProtocol.pending) < len(waiting):  # noqa: ASYNC110
                await asyncio.sleep(0)
        latest = await server.connect()
        latest.send(GET + b"\r\n")
        assert (await latest.response())[0] == 200
        assert (await waiting[0].refusal())[0] == 408
        waiting[1].send(b" HTTP/1.1\r\n\r\n")
        assert (await waiting[1].response())[0] == 200


async def test_connection_that_was_idle_longest_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundedProtocol, "max_idle", 2)
    async with serving(monkeypatch) as server:
        first, second, third = [await server.connect() for _ in range(3)]
        for connection in (first, second, first, third):
            connection.send(GET + b"\r\n")
            assert await connection.response() == (200, {"size": 0})
        assert await second.reader.read() == b""
        for connection in (first, third, first):
            connection.send(GET + b"\r\n")
            assert await connection.response() == (200, {"size": 0})
        first.writer.close()
        async with asyncio.timeout(WAIT_S):
            while len(BoundedProtocol.idle) > 1:  # noqa: ASYNC110
                await asyncio.sleep(0)


async def test_what_is_not_http_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(monkeypatch) as server:
        connection = await server.connect()
        connection.send(b"\x16\x03\x01 tls?\r\n\r\n")
        # uvicorn has no request yet, and closes; in the middle of one it says 400.
        assert b"200" not in await connection.reader.read()
        connection = await server.connect()
        connection.send(GET + b"no colon\r\n\r\n")
        assert (await connection.refusal())[0] == 400


UPGRADE = b"host: a\r\nconnection: keep-alive, Upgrade\r\nupgrade: websocket\r\n"


@pytest.mark.parametrize(
    "header",
    [
        b"GET /v1/realtime HTTP/1.1\r\n" + UPGRADE,
        b"POST /health HTTP/1.1\r\n" + UPGRADE,
        b"POST /health HTTP/1.1\r\n" + UPGRADE + b"content-length: 1000000\r\n",
        b"GET /health HTTP/1.1\r\n" + UPGRADE + b"content-length: 1000000\r\n",
        b"GET /health HTTP/1.1\r\n" + UPGRADE + b"transfer-encoding: chunked\r\n",
    ],
    ids=["get", "method", "post", "length", "chunks"],
)
async def test_web_socket_is_refused(monkeypatch: pytest.MonkeyPatch, header: bytes) -> None:
    """uvicorn's other protocol would wait for the rest, and take messages, without a bound."""
    async with serving(monkeypatch) as server:
        connection = await server.connect()
        connection.send(header + b"\r\n")
        assert await connection.refusal() == (403, NO_WEB_SOCKETS)
        assert not BoundedProtocol.pending


async def test_upgrade_to_another_protocol_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by clients that ask for HTTP/2 with their first request."""
    async with serving(monkeypatch) as server:
        connection = await server.connect()
        connection.send(b"GET / HTTP/1.1\r\n" + UPGRADE.replace(b"websocket", b"h2c") + b"\r\n")
        assert await connection.response() == (200, {"size": 0})


@pytest.mark.parametrize("name", ["Content-Type", "content-length", "Authorization", "Idempotency-Key"])
async def test_header_of_which_there_may_be_one_is_refused_twice(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    async with serving(monkeypatch) as server:
        connection = await server.connect()
        connection.send(GET + f"{name}: 1\r\nX-A: 1\r\nX-A: 1\r\n{name.upper()}: 1\r\n\r\nb".encode())
        status, reason = await connection.refusal()
        # The parser itself refuses two lengths.
        assert status == 400 and (f" {name} header" in reason or name == "content-length")


async def ask(content: bytes | str, path: str = "/v1/completions", **headers: str) -> httpx.Response:
    transport = httpx.ASGITransport(CheckRequest(echo))
    async with httpx.AsyncClient(transport=transport, base_url="http://fleet") as client:
        return await client.post(
            path, content=content, headers={"content-type": "application/json", **headers}
        )


@pytest.mark.parametrize("name", ["X-Request-Id", "x-session-id"])
@pytest.mark.parametrize(
    ("chosen", "reason"),
    [
        ("a" * (MAX_BYTES + 1), f"must have at most {MAX_BYTES} bytes"),
        ("é" * (MAX_BYTES // 2 + 1), f"must have at most {MAX_BYTES} bytes"),
        ("a\x1b[31m", "must consist of printable characters"),
        ("a\x9b31m", "must consist of printable characters"),
    ],
)
async def test_id_in_a_header_is_checked(name: str, chosen: str, reason: str) -> None:
    reply = await ask("{}", **{name: chosen.encode("latin-1")})  # type: ignore[arg-type]
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].lower() == f"{name} {reason}.".lower()
    assert (await ask("{}", **{name: "a" * MAX_BYTES})).status_code == 200


def nested(levels: int) -> str:
    return '{"a":[' * (levels // 2) + '"]}]}"' + "]}" * (levels // 2)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (nested(MAX_NESTING + 2), "nested more than 100 levels deep"),
        ("[" * 100_000, "nested more than 100 levels deep"),
        (r'{"stop": ["x", "\ud800"]}', "stop[1] has a lone surrogate"),
        (r'{"vllm_xargs": {"\udc00\ud800": 1}}', r"vllm_xargs.\udc00\ud800 has a lone surrogate"),
        (r'"\ud83d"', "The body has a lone surrogate"),
        (b'{"stop": "\xed\xa0\x80"}', "The body is not UTF-8"),
        ('{"stop": "x"}'.encode("utf-16-le"), "The body is not UTF-8"),
        ('{"stop": "x"}'.encode("utf-8-sig"), "begins with a byte order mark"),
        ('{"stop": "' + r"\ud800" * 50_000 + '"}', "has a lone surrogate"),
        (f'{{"top_k": {1 << 64}}}', "top_k is an integer of more than 64 bits"),
        (f'{{"a": [{{"b":-{(1 << 63) + 1}}}]}}', "a[0].b is an integer of more than 64 bits"),
        (
            f'{{"response_format": {{"a": {1 << 64}}}}}',
            "response_format.a is an integer of more than 64 bits",
        ),
    ],
    ids=[
        "deep",
        "deeper",
        "surrogate",
        "key",
        "text",
        "raw",
        "utf-16",
        "mark",
        "large",
        "65 bits",
        "below",
        "schema",
    ],
)
async def test_body_that_vllm_cannot_handle_is_refused(body: bytes | str, reason: str) -> None:
    reply = await ask(body)
    assert reply.status_code == 400 and reason in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        nested(MAX_NESTING),
        r'{"stop": "\ud83d\ude00\\ud800"}',
        '{"stop": "\U0001f600"}',
        r'{"pad": "' + "[" * 500 + r'\"[\\", "x": ["é", "\u00e9"]}',
        # Not strict JSON, but Python's parser takes it.
        r'{"temperature": NaN, "stop": "\u00e9"}',
        f'{{"stop": ", {1 << 70}", "tools": [{1 << 70}], "max": {(1 << 64) - 1}}}',
        # For vLLM to refuse.
        "{",
    ],
    ids=["deep", "pair", "emoji", "brackets in text", "nan", "64 bits", "no json"],
)
async def test_other_bodies_are_passed_on_as_they_are(body: str) -> None:
    assert (await ask(body)).json() == {"size": len(body.encode())}


def test_nesting_is_counted_across_blocks() -> None:
    # 256 KiB at a time, with a string and an escape across the borders.
    pad = '"' + "[" * ((1 << 18) - 2) + '\\"' + "[" * (1 << 18) + '"'
    assert not problem_with_body(f"[{pad},{nested(MAX_NESTING - 2)}]".encode())
    assert problem_with_body(f"[{pad},{nested(MAX_NESTING)}]".encode())


async def test_forms_are_not_read_where_vllm_takes_them() -> None:
    form = {"content-type": "multipart/form-data; boundary=b"}
    assert (await ask("[" * 1000, "/v1/audio/transcriptions", **form)).json() == {"size": 1000}
    assert (await ask("[" * 1000, "/v1/completions", **form)).status_code == 400


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/audio/transcriptions"])
async def test_first_content_type_counts_as_in_vllm(path: str) -> None:
    kinds = [("content-type", "application/json"), ("content-type", "multipart/form-data; boundary=b")]
    transport = httpx.ASGITransport(CheckRequest(echo))
    async with httpx.AsyncClient(transport=transport, base_url="http://fleet") as client:
        reply = await client.post(path, content="[" * 1000, headers=kinds)
    assert reply.status_code == 400
