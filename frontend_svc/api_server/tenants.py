"""ASGI middleware for vLLM's Python app: who comes in, with what, before anything is placed."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextvars import ContextVar
from http import HTTPStatus
from typing import ClassVar, Final

import msgspec

from frontend_svc.api_server.middleware import App, Message, Receive, Send, send_error
from frontend_svc.api_server.spec import DEFAULT_MAX_BODY_BYTES
from tailrace.tenancy.book import Tenant
from tailrace.tenancy.file import KeyFile
from tailrace.tenancy.meter import Meter

OPEN_PATHS: Final = frozenset({"/health", "/ping", "/version"})
"""For probes: without a key."""

SERVED: Final = frozenset(
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
"""With a key. Every other route of vLLM's is answered with 404, also one that comes with its next version."""

tenant_of_call: ContextVar[Tenant | None] = ContextVar("tenant_of_call", default=None)
"""Whose request the current task serves; None: keys are not asked for."""


class _Body(msgspec.Struct):
    """What is looked at of a request; the rest is vLLM's."""

    model: str | None = None


class Tenants:
    """Keys, and what has been taken by whom, of one API server."""

    def __init__(self, keys: KeyFile, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds."""
        self._keys = keys
        self._clock = clock
        self.meter = Meter()

    def owner(self, scope: Message) -> Tenant | None:
        """The tenant of the request's key; None: no tenant's."""
        given = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, token = given.partition(b" ")
        if scheme.lower() != b"bearer":
            return None
        return self._keys.index().owner(token.decode("latin-1").strip())

    def now_s(self) -> float:
        """Seconds."""
        return self._clock()


class BodyLimit:
    """Answer 413 to a body of more than `most_bytes`, before anybody reads it."""

    most_bytes: ClassVar[int] = DEFAULT_MAX_BODY_BYTES

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = dict(scope["headers"]).get(b"content-length")
        if length is None:
            # Sent in chunks: how much it is shows when all is there.
            body = await read_body(receive, self.most_bytes)
            if body is not None:
                await self._app(scope, replaying(body, receive), send)
                return
        elif length.isdigit() and int(length) <= self.most_bytes:
            # The server takes no more than was announced.
            await self._app(scope, receive, send)
            return
        message = f"A request's body may have at most {self.most_bytes} bytes."
        await send_error(send, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "BadRequestError", message)


class TenantAdmission:
    """Let in who has a key, to what its tenant may have, at its rate; 401, 403, 404 or 429 else."""

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
            # vLLM has web sockets for speech, which no key of ours guards.
            await send({"type": "websocket.close", "code": 1008})
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path in OPEN_PATHS and scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        tenant = tenants.owner(scope)
        if tenant is None:
            message = "This API wants a key that it knows: send the header 'Authorization: Bearer KEY'."
            challenge = {"www-authenticate": "Bearer"}
            await send_error(send, HTTPStatus.UNAUTHORIZED, "AuthenticationError", message, challenge)
        elif (scope["method"], path) not in SERVED:
            message = f"{scope['method']} {path} is not served here."
            await send_error(send, HTTPStatus.NOT_FOUND, "NotFoundError", message)
        elif scope["method"] == "GET":
            await self._app(scope, receive, send)
        else:
            await self._let_in(tenants, tenant, scope, receive, send)

    async def _let_in(
        self, tenants: Tenants, tenant: Tenant, scope: Message, receive: Receive, send: Send
    ) -> None:
        if tenant.models:
            body = await read_body(receive, BodyLimit.most_bytes)
            if body is None or not (_resumes(scope, body) or _model(body) in tenant.models):
                model = None if body is None else _model(body)
                named = "one of its models" if model is None else repr(model)
                message = f"This key may ask {', '.join(tenant.models)}, not {named}."
                await send_error(send, HTTPStatus.FORBIDDEN, "PermissionDeniedError", message)
                return
            receive = replaying(body, receive)
        excess = tenants.meter.begin(tenant, tenants.now_s())
        if excess is not None:
            message = f"Too much for this key: {excess.reason}."
            later = {"retry-after": str(excess.retry_after_s)}
            await send_error(send, HTTPStatus.TOO_MANY_REQUESTS, "RateLimitError", message, later)
            return
        token = tenant_of_call.set(tenant)
        try:
            await self._app(scope, receive, send)
        finally:
            tenant_of_call.reset(token)
            tenants.meter.end(tenant)


async def read_body(receive: Receive, most_bytes: int) -> bytes | None:
    """A request's whole body; None: it is larger, or the client has gone."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        part = message.get("body", b"")
        size += len(part)
        if size > most_bytes:
            return None
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def replaying(body: bytes, receive: Receive) -> Receive:
    """Give the body once more, then what comes after it."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return first.pop() if first else await receive()

    return again


def _resumes(scope: Message, body: bytes) -> bool:
    """Whether it says of what it asks only which answer to go on with: its model was looked at when that was
    begun, and another tenant's answer is not found."""
    return not body and any(name == b"last-event-id" for name, _ in scope["headers"])


def _model(body: bytes) -> str | None:
    try:
        return msgspec.json.decode(body, type=_Body).model
    except msgspec.MsgspecError:
        return None
