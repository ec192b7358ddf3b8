"""ASGI middleware for vLLM's Python app: refuse what vLLM answers with a 500, or passes on without a bound.

vLLM takes a client's request id as it is, parses JSON of any depth, and accepts text that cannot be encoded
(a lone surrogate), which fails only when the request is sent to the engine.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from http import HTTPStatus
from typing import ClassVar, Final

import msgspec
import numpy as np

from frontend_svc.api_server.middleware import App, Message, Receive, Send, send_error
from frontend_svc.api_server.spec import DEFAULT_MAX_BODY_BYTES
from frontend_svc.api_server.tenants import read_body, replay_body
from tailrace.request_ids import problem_with

MAX_NESTING: Final = 100
"""Deepest nesting of a body. Deeper values overflow the stack somewhere: templates, schemas, copies."""

# Headers that vLLM passes on as ids.
_ID_HEADERS: Final = {b"x-request-id": "X-Request-Id", b"x-session-id": "X-Session-ID"}
# By byte: what it adds to the level of nesting.
_LEVELS: Final = np.zeros(256, np.int8)
_LEVELS[[*b"[{"]], _LEVELS[[*b"]}"]] = 1, -1
_QUOTE: Final = ord('"')
_BACKSLASH: Final = ord("\\")
# A larger body is checked in a thread, block by block, and a field of it is not looked for.
_LARGE_BYTES: Final = 1 << 18
_LONE_SURROGATE: Final = "has a lone surrogate (half of a UTF-16 pair), which is not valid Unicode."
# A field's name in an error message.
_SHOWN_MAX: Final = 60


class CheckRequest:
    """Answer 400 to a request whose ids or body are not acceptable, and name what is wrong.

    Goes inside RequestLimits: it reads the body.
    """

    max_bytes: ClassVar[int] = DEFAULT_MAX_BODY_BYTES

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        problem = _problem_with_ids(scope)
        is_json = scope["method"] in ("POST", "PUT", "PATCH") and may_be_json(dict(scope["headers"]))
        if not problem and is_json:
            body = await read_body(receive, self.max_bytes)
            # None: the client has gone, as the app will see.
            if body is not None:
                large = len(body) > _LARGE_BYTES
                problem = (
                    await asyncio.to_thread(problem_with_body, body) if large else problem_with_body(body)
                )
                receive = replay_body(body, receive)
        if problem:
            await send_error(send, HTTPStatus.BAD_REQUEST, "BadRequestError", problem)
        else:
            await self._app(scope, receive, send)


def _problem_with_ids(scope: Message) -> str:
    for name, value in scope["headers"]:
        shown = _ID_HEADERS.get(name)
        if shown is not None and (problem := problem_with(value.decode("latin-1"))):
            return f"{shown} {problem}."
    return ""


def may_be_json(headers: dict[bytes, bytes]) -> bool:
    """Return whether the app could parse the body as JSON: not if it is a form, which has files in it."""
    content_type = headers.get(b"content-type", b"").lower()
    return not content_type.startswith((b"multipart/", b"application/x-www-form-urlencoded"))


def problem_with_body(body: bytes) -> str:
    """Return why a body is refused; empty if it is not. What is no JSON at all is left to vLLM."""
    if not body.isascii():
        try:
            body.decode()
        except UnicodeDecodeError as error:
            return f"The body is not UTF-8: {error.reason} at byte {error.start}."
    # Python's parser takes UTF-16 and UTF-32 as well, whose ASCII characters have null bytes.
    if b"\0" in body:
        return "The body is not UTF-8: it has null bytes."
    if body.count(b"[") + body.count(b"{") > MAX_NESTING and _is_deep(body):
        return f"The body is nested more than {MAX_NESTING} levels deep."
    if b"\\u" not in body:
        return ""
    try:
        # Strict, and fast.
        msgspec.json.decode(body, type=msgspec.Raw)
    except msgspec.DecodeError:
        if len(body) > _LARGE_BYTES:
            return f"The body is not JSON, or it {_LONE_SURROGATE}"
        where = _lone_surrogate(body)
        return f"{where} {_LONE_SURROGATE}" if where else ""
    return ""


def _is_deep(body: bytes) -> bool:
    text = np.frombuffer(body, np.uint8)
    level, in_string, backslashes = 0, 0, 0
    for start in range(0, len(text), _LARGE_BYTES):
        block = text[start : start + _LARGE_BYTES]
        # How many backslashes end at each byte; an odd number escapes the next one.
        at = np.arange(1, len(block) + 1, dtype=np.int32)
        others = np.maximum.accumulate(np.where(block == _BACKSLASH, -backslashes, at))
        runs = np.concatenate(([backslashes], at - others))
        backslashes = int(runs[-1])
        quotes = np.cumsum((block == _QUOTE) & (runs[:-1] & 1 == 0), dtype=np.int32) + in_string
        in_string = int(quotes[-1]) & 1
        levels = np.cumsum(np.where(quotes & 1, 0, _LEVELS[block]), dtype=np.int32) + level
        if levels.max() > MAX_NESTING:
            return True
        level = int(levels[-1])
    return False


def _lone_surrogate(body: bytes) -> str:
    """Return the first field that has one; empty if none has, or the body is not JSON."""
    try:
        parsed = json.loads(body)
    except ValueError:
        return ""
    return next((path or "The body" for path, text in _texts(parsed, "") if not _is_encodable(text)), "")


def _texts(value: object, path: str) -> Iterator[tuple[str, str]]:
    """Yield each string in a value with the path of its field; the names of fields, too."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, list):
        for number, element in enumerate(value):
            yield from _texts(element, f"{path}[{number}]")
    elif isinstance(value, dict):
        for name, element in value.items():
            shown = ascii(name)[1:-1][:_SHOWN_MAX]
            inside = f"{path}.{shown}" if path else shown
            yield inside, name
            yield from _texts(element, inside)


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
