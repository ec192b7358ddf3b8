"""ASGI middleware for vLLM's Python app: a stream that fails before its first event gets an HTTP error
status."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Final

import msgspec

from frontend_svc.api_server.middleware import HttpMiddleware, Message, Receive, Send

# Longest time that a response's headers wait for the first event: placing takes less unless the fleet is
# full, and a client with a deadline for the headers hardly notices.
HOLD_S: Final = 1.0

_ERROR: Final = b'data: {"error"'


class _Error(msgspec.Struct):
    code: int = 0


class _ErrorEvent(msgspec.Struct):
    error: _Error


class StreamStart(HttpMiddleware):
    """Hold the start of an event stream back until its first event, `HOLD_S` at most.

    vLLM starts a stream before its engine has seen the request, so a refusal would be an event in a response
    that began with 200. If the first event is an error, the response becomes that error, with its status.
    """

    async def handle(self, scope: Message, receive: Receive, send: Send) -> None:
        response = _Response(send)
        try:
            await self._app(scope, receive, response.send)
        finally:
            await response.close()


class _Response:
    """One response whose start may be held."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None
        self._release_task: asyncio.Task[None] | None = None
        self._first_event_seen = asyncio.Event()
        # The response was replaced by an error, which has been sent.
        self._replaced = False
        # The stream's first event has been sent.
        self._begun = False

    def send(self, message: Message) -> Awaitable[None]:
        """Handle one ASGI message of the app."""
        # Not a coroutine: it is called for every token, and nearly all messages are only passed on.
        if self._begun:
            return self._send(message)
        return self._send_at_start(message)

    async def _send_at_start(self, message: Message) -> None:
        if message["type"] == "http.response.start" and _is_stream(message):
            self._start = message
            self._release_task = asyncio.create_task(self._release_after_hold(), name="start a stream")
            return
        if self._release_task is not None:
            await self._send_first(message)
        elif not self._replaced:
            await self._send(message)

    async def _send_first(self, message: Message) -> None:
        await self.close()
        start, self._start = self._start, None
        if start is None:
            # The start was released in the meantime.
            self._begun = True
            await self._send(message)
            return
        body = message.get("body", b"")
        status = _error_status(body)
        if status is None:
            self._begun = True
            await self._send(start)
            await self._send(message)
            return
        self._replaced = True
        error = _first_event(body)
        headers = [pair for pair in start["headers"] if pair[0].lower() not in _REPLACED]
        headers += [(b"content-type", b"application/json"), (b"content-length", str(len(error)).encode())]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": error})

    async def close(self) -> None:
        """Stop waiting for a first event. A start without any event is left to the server to report."""
        self._first_event_seen.set()
        release_task, self._release_task = self._release_task, None
        if release_task is not None:
            # Raises what sending the start raised: the client has gone, which the app has to handle.
            try:
                await release_task
            finally:
                # It keeps that error, whose frames have it.
                del release_task

    async def _release_after_hold(self) -> None:
        # Ended by an event, not cancelled, so that a start in progress is sent completely. Only the end of
        # the call itself, whose client has gone, cancels it.
        try:
            async with asyncio.timeout(HOLD_S):
                await self._first_event_seen.wait()
        except TimeoutError:
            start, self._start = self._start, None
            if start is not None:
                await self._send(start)


_REPLACED: Final = frozenset({b"content-type", b"content-length"})


def _is_stream(start: Message) -> bool:
    headers: dict[bytes, bytes] = dict(start.get("headers", []))
    return bool(start["status"] == 200) and headers.get(b"content-type", b"").startswith(b"text/event-stream")


def _first_event(body: bytes) -> bytes:
    return body.removeprefix(b"data: ").partition(b"\n")[0]


def _error_status(body: bytes) -> int | None:
    """Return the status of an event that is an error in OpenAI's format, or None."""
    if not body.startswith(_ERROR):
        return None
    try:
        event = msgspec.json.decode(_first_event(body), type=_ErrorEvent)
    except msgspec.MsgspecError:
        return None
    return event.error.code if 400 <= event.error.code < 600 else None
