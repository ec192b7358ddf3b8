"""ASGI's types, and an error response in OpenAI's shape, for the middleware of vLLM's Python app."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from http import HTTPStatus
from typing import Any

# Messages and scopes are open dictionaries by ASGI's specification.
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


async def send_error(
    send: Send, status: HTTPStatus, kind: str, message: str, headers: Mapping[str, str] | None = None
) -> None:
    """Send a whole response: OpenAI's error object of type `kind` with this status."""
    error = {"message": message, "type": kind, "param": None, "code": status.value}
    body = json.dumps({"error": error}).encode()
    fields = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
    encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status.value, "headers": encoded})
    await send({"type": "http.response.body", "body": body})
