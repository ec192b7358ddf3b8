"""A stream that fails before its first event is answered with an error status."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from frontend_svc.api_server import stream_start
from frontend_svc.api_server.middleware import Message, Receive, Send
from frontend_svc.api_server.stream_start import StreamStart
from tests.waiting import WAIT_S

ERROR = b'{"error": {"message": "too much to do", "type": "x", "param": null, "code": 429}}'
STREAM = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-request-id", b"7")],
}


def part(body: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


async def run_app(parts: Callable[[list[Message]], AsyncIterator[Message]]) -> list[Message]:
    """Return what the client receives from an app that sends these parts, given what was sent so far."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        raise AssertionError("the request is not read")

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        async for message in parts(sent):
            await send(message)

    await StreamStart(app)({"type": "http"}, receive, send)
    return sent


async def test_error_as_the_first_event_becomes_the_response() -> None:
    async def parts(sent: list[Message]) -> AsyncIterator[Message]:
        yield STREAM
        yield part(b"data: " + ERROR + b"\n\n")
        assert sent[0]["status"] == 429
        yield part(b"data: [DONE]\n\n")
        yield part(b"", more=False)

    start, body = await run_app(parts)
    assert dict(start["headers"]) == {
        b"x-request-id": b"7",
        b"content-type": b"application/json",
        b"content-length": str(len(ERROR)).encode(),
    }
    assert body["body"] == ERROR and not body.get("more_body")


@pytest.mark.parametrize(
    "first",
    [
        b'data: {"id": 1}\n\n',
        b'data: {"error": {"code": 200}}\n\n',
        b'data: {"error": 1}\n\n',
        b'data: {"error"',
        b"",
    ],
)
async def test_any_other_first_event_starts_the_stream(first: bytes) -> None:
    messages = [part(first), part(b"data: " + ERROR + b"\n\n"), part(b"", more=False)]

    async def parts(sent: list[Message]) -> AsyncIterator[Message]:
        yield STREAM
        assert sent == []
        for message in messages:
            yield message

    assert await run_app(parts) == [STREAM, *messages]


async def test_slow_stream_starts_before_its_first_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream_start, "HOLD_S", 0.0)

    async def parts(sent: list[Message]) -> AsyncIterator[Message]:
        yield STREAM
        async with asyncio.timeout(WAIT_S):
            while not sent:  # noqa: ASYNC110 - until the headers are out
                await asyncio.sleep(0)
        yield part(b"data: " + ERROR + b"\n\n", more=False)

    # The headers have been sent, so the error is an event.
    assert [message["type"] for message in await run_app(parts)] == [
        "http.response.start",
        "http.response.body",
    ]


async def test_other_responses_are_passed_on_at_once() -> None:
    start = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/html")]}

    async def parts(sent: list[Message]) -> AsyncIterator[Message]:
        yield start
        assert sent == [start]
        yield part(b"data: " + ERROR, more=False)

    assert (await run_app(parts))[0] == start


async def test_stream_without_events_leaves_no_task_behind() -> None:
    async def parts(sent: list[Message]) -> AsyncIterator[Message]:
        yield STREAM

    before = asyncio.all_tasks()
    assert await run_app(parts) == []
    assert asyncio.all_tasks() == before
