"""ASGI middleware for vLLM's Python app: refuse what vLLM answers with a 500, or passes on without a bound.

vLLM takes a client's request id as it is, parses JSON of any depth, and accepts text that cannot be encoded
(a lone surrogate), which fails only when the request is sent to the engine.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import ClassVar, Final

from frontend_svc.api_server.middleware import (
    HttpMiddleware,
    Message,
    Receive,
    Send,
    headers_of,
    path_of,
    send_error,
)
from frontend_svc.api_server.spec import DEFAULT_MAX_BODY_BYTES
from frontend_svc.api_server.tenants import read_body, replay_body
from tailrace.request_ids import problem_with
from tailrace.tenancy.body import LARGE_BODY_BYTES, is_form, problem_with_body

# Headers that vLLM passes on as ids.
_ID_HEADERS: Final = {b"x-request-id": "X-Request-Id", b"x-session-id": "X-Session-ID"}
# vLLM's only routes that take a form.
_FORM_PATHS: Final = frozenset({"/v1/audio/transcriptions", "/v1/audio/translations"})


class CheckRequest(HttpMiddleware):
    """Answer 400 to a request whose ids or body are not acceptable, and name what is wrong.

    Goes inside RequestLimits: it reads the body.
    """

    max_bytes: ClassVar[int] = DEFAULT_MAX_BODY_BYTES

    async def handle(self, scope: Message, receive: Receive, send: Send) -> None:
        problem = problem_with(
            (_ID_HEADERS[name], value.decode("latin-1"))
            for name, value in scope["headers"]
            if name in _ID_HEADERS
        )
        is_json = scope["method"] in ("POST", "PUT", "PATCH") and may_be_json(scope)
        if not problem and is_json:
            body = await read_body(receive, self.max_bytes)
            # None: the client has gone, as the app will see.
            if body is not None:
                large = len(body) > LARGE_BODY_BYTES
                problem = (
                    await asyncio.to_thread(problem_with_body, body) if large else problem_with_body(body)
                )
                receive = replay_body(body, receive)
        if problem:
            await send_error(send, HTTPStatus.BAD_REQUEST, "BadRequestError", problem)
        else:
            await self._app(scope, receive, send)


def may_be_json(scope: Message) -> bool:
    """Return whether the app could parse the body as JSON: not if it is a form, which has files in it."""
    if path_of(scope) not in _FORM_PATHS:
        return True
    return not is_form(content_type(scope))


def content_type(scope: Message) -> str:
    """Return the type of the body in lower case, without parameters."""
    return headers_of(scope).get(b"content-type", b"").decode("latin-1").lower().partition(";")[0].strip()
