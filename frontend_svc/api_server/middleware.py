"""Basic ASGI middleware for vLLM's Python app: Retry-After, graceful stop, API keys, readiness, schema."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from argparse import Namespace
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, ClassVar, Final

from frontend_svc.admission import AdmissionReader, Refusal
from tailrace.service.openai_error import error_body

if TYPE_CHECKING:
    import uvicorn

# Messages and scopes are open dictionaries by ASGI's specification.
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


SINGLE_HEADERS: Final = frozenset({b"authorization", b"content-length", b"content-type", b"idempotency-key"})
"""Header fields of which a request may have one: of two, ours and vLLM's code could read different ones."""


def headers_of(scope: Message) -> dict[bytes, bytes]:
    """Return the header fields; of equal names the first one, which FastAPI and vLLM read."""
    return dict(reversed(scope["headers"]))


def path_of(scope: Message) -> str:
    """Return the path as the app's router reads it."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


async def send_error(
    send: Send, status: HTTPStatus, kind: str, message: str, headers: Mapping[str, str] | None = None
) -> None:
    """Send a whole response: OpenAI's error object of type `kind` with this status."""
    body = error_body(status, kind, message)
    fields = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
    encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status.value, "headers": encoded})
    await send({"type": "http.response.body", "body": body})


class HttpMiddleware:
    """ASGI middleware for HTTP requests; all else is passed on."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] == "http":
            await self.handle(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def handle(self, scope: Message, receive: Receive, send: Send) -> None:
        """Handle one HTTP request."""
        raise NotImplementedError


RETRY_AFTER_S: Final = 2
_STATUSES: Final = (429, 503)


class RetryAfter(HttpMiddleware):
    """Add `Retry-After` to a 429 or 503 that has none."""

    async def handle(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass everything on; inspect only the start of the response."""

        # Not a coroutine: it is called for every token.
        def send_start(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start" and message["status"] in _STATUSES:
                headers = list(message.get("headers", []))
                if not any(name.lower() == b"retry-after" for name, _ in headers):
                    message["headers"] = [*headers, (b"retry-after", str(RETRY_AFTER_S).encode())]
            return send(message)

        await self._app(scope, receive, send_start)


class GracefulStop:
    """Handle SIGTERM and SIGINT once the app has started, which is after vLLM has set its handlers.

    vLLM's own handler first shuts its engine client down, which cuts every response. uvicorn's behaviour is
    the desired one: accept nothing more, finish the responses, then exit. But it tells only the connections
    that it has to close after their response, not one that is being accepted in the same moment, on which a
    client could go on for as long as it likes.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass everything on; take the server from the app's lifespan scope."""
        if scope["type"] == "lifespan":
            _install_signal_handlers(scope["app"].state.server)
        elif scope["type"] == "http" and scope["app"].state.server.should_exit:
            send = _closing(send)
        await self._app(scope, receive, send)


def _closing(send: Send) -> Send:
    """Return a send function that has the server close the connection after the response."""

    def send_start(message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", []), (b"connection", b"close")]
        return send(message)

    return send_start


def _install_signal_handlers(server: uvicorn.Server) -> None:
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
        if not self.keys or scope["type"] == "lifespan" or is_open(scope) or self._has_key(scope):
            await self._app(scope, receive, send)
        else:
            message = "This API requires a key: send the header 'Authorization: Bearer KEY'."
            challenge = {"www-authenticate": "Bearer"}
            await send_error(send, HTTPStatus.UNAUTHORIZED, "AuthenticationError", message, challenge)

    def _has_key(self, scope: Message) -> bool:
        authorization = headers_of(scope).get(b"authorization", b"")
        scheme, _, token = authorization.partition(b" ")
        # Compare all keys, each in constant time, so that the duration reveals nothing.
        matches = [secrets.compare_digest(token, key.encode()) for key in self.keys]
        return scheme.lower() == b"bearer" and any(matches)


def is_open(scope: Message) -> bool:
    """Return whether a request needs no key: for one of OPEN_PATHS, or a browser's preflight request."""
    return scope["type"] == "http" and (is_preflight(scope) or path_of(scope) in OPEN_PATHS)


def is_preflight(scope: Message) -> bool:
    """Return whether a browser asks whether a page may send a request: it has no key, and vLLM's app answers
    without a handler."""
    if scope["type"] != "http" or scope["method"] != "OPTIONS":
        return False
    names = {name for name, _ in scope["headers"]}
    return {b"origin", b"access-control-request-method"} <= names


READY_PATH: Final = "/ready"
_UNAVAILABLE: Final = HTTPStatus.SERVICE_UNAVAILABLE.phrase


def unready_body(unready: Refusal) -> bytes:
    """Return OpenAI's error object that says why a load balancer should send requests elsewhere."""
    return error_body(HTTPStatus(unready.status), _UNAVAILABLE, unready.message)


class Ready(HttpMiddleware):
    """Answer GET /ready: 503 while no instance takes requests, otherwise 200.

    Goes outside what asks for keys and counts requests.
    """

    admission: ClassVar[AdmissionReader]

    async def handle(self, scope: Message, receive: Receive, send: Send) -> None:
        if path_of(scope) != READY_PATH or scope["method"] not in ("GET", "HEAD"):
            await self._app(scope, receive, send)
        elif (unready := self.admission.read().unready) is not None:
            later = {"retry-after": str(RETRY_AFTER_S)}
            await send_error(send, HTTPStatus(unready.status), _UNAVAILABLE, unready.message, later)
        else:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})


class SchemaApart(HttpMiddleware):
    """Build the schema of `/openapi.json` in a thread, once.

    FastAPI builds it at its first request, on the event loop: for vLLM's routes that takes seconds, during
    which no stream gets a token.
    """

    def __init__(self, app: App) -> None:
        super().__init__(app)
        self._building = asyncio.Lock()

    async def handle(self, scope: Message, receive: Receive, send: Send) -> None:
        fastapi = scope["app"]
        if path_of(scope) == fastapi.openapi_url:
            async with self._building:
                if fastapi.openapi_schema is None:
                    await asyncio.to_thread(fastapi.openapi)
        await self._app(scope, receive, send)


# ASGI middleware for vLLM's Python app: routes that control one engine answer 501 over a fleet.
#
# vLLM's development mode (VLLM_SERVER_DEV_MODE=1) and its elastic expert parallelism add routes that pause,
# sleep, re-weight or resize *the* engine. Behind this API server is a fleet whose scheduler places requests:
# an engine that sleeps on its own would strand its streams.

ENGINE_CONTROL_PATHS: Final = frozenset(
    {
        "/collective_rpc",
        "/finish_weight_update",
        "/get_world_size",
        "/init_weight_transfer_engine",
        "/is_paused",
        "/is_scaling_elastic_ep",
        "/is_sleeping",
        "/pause",
        "/release_kv_cache_memory",
        "/resume",
        "/scale_elastic_ep",
        "/shutdown_weight_transfer_engine",
        "/sleep",
        "/start_draft_weight_update",
        "/start_weight_update",
        "/update_weight_version",
        "/update_weights",
        "/wake_up",
        "/weight_checker",
        "/weight_info",
    }
)


class RefuseEngineControl(HttpMiddleware):
    """Answer 501 in OpenAI's error shape on ENGINE_CONTROL_PATHS; pass everything else on."""

    async def handle(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["path"].rstrip("/") not in ENGINE_CONTROL_PATHS:
            await self._app(scope, receive, send)
            return
        message = (
            f"{scope['path']} controls a single engine and is not available on a fleet. "
            "To take an instance out of service use `tailrace drain INSTANCE`."
        )
        await send_error(send, HTTPStatus.NOT_IMPLEMENTED, "NotImplementedError", message)
