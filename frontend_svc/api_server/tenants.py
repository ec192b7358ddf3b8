"""ASGI middleware for vLLM's Python app: authenticate tenants and apply their limits before anything is
placed."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextvars import ContextVar
from http import HTTPStatus
from typing import ClassVar, Final

import msgspec

from frontend_svc.api_server.middleware import App, Message, Receive, Send, send_error
from frontend_svc.api_server.spec import DEFAULT_MAX_BODY_BYTES
from tailrace.tenancy.file import KeyFile
from tailrace.tenancy.keys import Tenant
from tailrace.tenancy.meter import LimitExceeded, Meter

OPEN_PATHS: Final = frozenset({"/health", "/ping", "/version"})
"""Paths for probes, served without a key."""

SERVED_ROUTES: Final = frozenset(
    {
        ("GET", "/v1/models"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/responses"),
        ("POST", "/v1/messages"),
        ("POST", "/v1/embeddings"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
    }
)
"""Routes served with a key. All others get 404, including any that a later version of vLLM adds."""

tenant_of_call: ContextVar[Tenant | None] = ContextVar("tenant_of_call", default=None)
"""The tenant of the request that the current task serves; None if no keys are required."""


class _Body(msgspec.Struct):
    """The fields of a request that matter here; the rest is vLLM's."""

    model: str | None = None


class Tenants:
    """Hold the keys and the tenants' usage of one API server."""

    def __init__(self, keys: KeyFile, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds."""
        self._keys = keys
        self._clock = clock
        self.meter = Meter()

    def owner(self, scope: Message) -> Tenant | None:
        """Return the tenant of the request's key, or None."""
        authorization = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, token = authorization.partition(b" ")
        if scheme.lower() != b"bearer":
            return None
        return self._keys.index().owner(token.decode("latin-1").strip())

    def now_s(self) -> float:
        """Return the clock's time in seconds."""
        return self._clock()


class BodyLimit:
    """Answer 413 to a body of more than `max_bytes` before the app reads it.

    Goes inside what checks keys: a chunked body is read here, which costs memory and time.
    """

    max_bytes: ClassVar[int] = DEFAULT_MAX_BODY_BYTES

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = dict(scope["headers"]).get(b"content-length")
        if length is None:
            # Chunked: the size is known only once all of it has arrived.
            body = await read_body(receive, self.max_bytes)
            if body is not None:
                await self._app(scope, replay_body(body, receive), send)
                return
        elif length.isdigit() and int(length) <= self.max_bytes:
            # The server reads no more than was announced.
            await self._app(scope, receive, send)
            return
        message = f"A request's body may have at most {self.max_bytes} bytes."
        await send_error(send, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "BadRequestError", message)


class TenantAdmission:
    """Admit requests with a valid key, for routes that are served and within the tenant's limits; answer 401,
    404 or 429 otherwise.

    Reads no body: a refusal costs the event loop, which all tenants share, the same whatever was sent.
    """

    tenants: ClassVar[Tenants | None] = None

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        tenants = self.tenants
        if tenants is None or scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            # vLLM has web sockets for speech, which our keys do not protect.
            await send({"type": "websocket.close", "code": 1008})
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path in OPEN_PATHS and scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        tenant = tenants.owner(scope)
        if tenant is None:
            message = "This API requires a valid key: send the header 'Authorization: Bearer KEY'."
            challenge = {"www-authenticate": "Bearer"}
            await send_error(send, HTTPStatus.UNAUTHORIZED, "AuthenticationError", message, challenge)
        elif (scope["method"], path) not in SERVED_ROUTES:
            message = f"{scope['method']} {path} is not served here."
            await send_error(send, HTTPStatus.NOT_FOUND, "NotFoundError", message)
        elif scope["method"] == "GET":
            await self._app(scope, receive, send)
        elif (exceeded := tenants.meter.refusal(tenant, tenants.now_s())) is not None:
            await _send_exceeded(send, exceeded)
        else:
            token = tenant_of_call.set(tenant)
            try:
                await self._app(scope, receive, send)
            finally:
                tenant_of_call.reset(token)


class TenantRequests:
    """Check the model of requests that TenantAdmission admitted, and count them; answer 403, or 429 if others
    of the tenant began in the meantime."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        tenants, tenant = TenantAdmission.tenants, tenant_of_call.get()
        if tenants is None or tenant is None:
            await self._app(scope, receive, send)
            return
        if tenant.models:
            body = await read_body(receive, BodyLimit.max_bytes)
            if body is None or not (_resumes(scope, body) or _model(body) in tenant.models):
                model = None if body is None else _model(body)
                named = "one of its models" if model is None else repr(model)
                message = f"This key may use {', '.join(tenant.models)}, not {named}."
                await send_error(send, HTTPStatus.FORBIDDEN, "PermissionDeniedError", message)
                return
            receive = replay_body(body, receive)
        exceeded = tenants.meter.begin(tenant, tenants.now_s())
        if exceeded is not None:
            await _send_exceeded(send, exceeded)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            tenants.meter.end(tenant)


async def _send_exceeded(send: Send, exceeded: LimitExceeded) -> None:
    message = f"Limit of this key exceeded: {exceeded.reason}."
    later = {"retry-after": str(exceeded.retry_after_s)}
    await send_error(send, HTTPStatus.TOO_MANY_REQUESTS, "RateLimitError", message, later)


async def read_body(receive: Receive, max_bytes: int) -> bytes | None:
    """Return a request's complete body; None if it is larger than `max_bytes` or the client has gone."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        part = message.get("body", b"")
        size += len(part)
        if size > max_bytes:
            return None
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def replay_body(body: bytes, receive: Receive) -> Receive:
    """Return a receive function that yields the body again, then what follows it."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return first.pop() if first else await receive()

    return again


def _resumes(scope: Message, body: bytes) -> bool:
    """Return whether the request only says which answer to resume.

    Its model was checked when the answer was begun, and another tenant's answer is not found.
    """
    return not body and any(name == b"last-event-id" for name, _ in scope["headers"])


def _model(body: bytes) -> str | None:
    try:
        return msgspec.json.decode(body, type=_Body).model
    except msgspec.MsgspecError:
        return None
