"""Basic ASGI middleware for vLLM's Python app: Retry-After, graceful stop, and API keys."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
from argparse import Namespace
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from http import HTTPStatus
from typing import Any, ClassVar, Final, Protocol

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


RETRY_AFTER_S: Final = 2
_STATUSES: Final = (429, 503)


class RetryAfter:
    """Add `Retry-After` to a 429 or 503 that has none."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass everything on; inspect only the start of an HTTP response."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        # Not a coroutine: it is called for every token.
        def send_start(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start" and message["status"] in _STATUSES:
                headers = list(message.get("headers", []))
                if not any(name.lower() == b"retry-after" for name, _ in headers):
                    message["headers"] = [*headers, (b"retry-after", str(RETRY_AFTER_S).encode())]
            return send(message)

        await self._app(scope, receive, send_start)


class Server(Protocol):
    """The part of uvicorn.Server that is used here."""

    should_exit: bool
    force_exit: bool


class GracefulStop:
    """Handle SIGTERM and SIGINT once the app has started, which is after vLLM has set its handlers.

    vLLM's own handler first shuts its engine client down, which cuts every response. uvicorn's behaviour is
    the desired one: accept nothing more, finish the responses, then exit.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass everything on; take the server from the app's lifespan scope."""
        if scope["type"] == "lifespan":
            _install_signal_handlers(scope["app"].state.server)
        await self._app(scope, receive, send)


def _install_signal_handlers(server: Server) -> None:
    def stop() -> None:
        # A second signal exits at once.
        server.force_exit = server.should_exit
        server.should_exit = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)


OPEN_PATHS: Final = frozenset({"/health", "/ping", "/version", "/load", "/metrics"})


def api_keys(args: Namespace) -> list[str]:
    """Return the keys as vLLM takes them: from --api-key, else from VLLM_API_KEY."""
    keys: list[str] = args.api_key or [os.environ.get("VLLM_API_KEY", "")]
    return [key for key in keys if key]


class RequireApiKey:
    """Answer 401 in OpenAI's error format without a key of `keys`; with no keys set, pass everything on.

    vLLM protects only /v1, /v2, /inference and /cohere: /invocations generates, and /tokenize, /pooling or
    /rerank compute, for anyone who reaches the port.
    """

    keys: ClassVar[list[str]] = []

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if self.keys and scope["type"] == "http" and scope["method"] != "OPTIONS":
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            if path not in OPEN_PATHS and not self._has_key(scope):
                message = "This API requires a key: send the header 'Authorization: Bearer KEY'."
                challenge = {"www-authenticate": "Bearer"}
                await send_error(send, HTTPStatus.UNAUTHORIZED, "AuthenticationError", message, challenge)
                return
        await self._app(scope, receive, send)

    def _has_key(self, scope: Message) -> bool:
        authorization = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, token = authorization.partition(b" ")
        # Compare all keys, each in constant time, so that the duration reveals nothing.
        matches = [secrets.compare_digest(token, key.encode()) for key in self.keys]
        return scheme.lower() == b"bearer" and any(matches)
