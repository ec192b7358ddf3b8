"""ASGI middleware for vLLM's Python app: authenticate tenants and apply their limits before anything is
placed."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextvars import ContextVar
from http import HTTPStatus
from typing import ClassVar, Final

import msgspec

from frontend_svc.api_server.middleware import (
    App,
    Message,
    Receive,
    Send,
    headers_of,
    is_preflight,
    path_of,
    send_error,
)
from tailrace.tenancy.file import KeyFile
from tailrace.tenancy.keys import KEY_REQUIRED, Tenant
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


class Tenants:
    """Hold the keys and the tenants' usage of one API server."""

    def __init__(self, keys: KeyFile, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds."""
        self._keys = keys
        self._clock = clock
        self.meter = Meter()

    def owner(self, scope: Message) -> Tenant | None:
        """Return the tenant of the request's key, or None."""
        authorization = headers_of(scope).get(b"authorization", b"")
        holder = self._keys.index().bearer(authorization.decode("latin-1"))
        return None if holder is None else holder.tenant

    def now_s(self) -> float:
        """Return the clock's time in seconds."""
        return self._clock()


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
        path = path_of(scope)
        if is_preflight(scope) or (path in OPEN_PATHS and scope["method"] in ("GET", "HEAD")):
            await self._app(scope, receive, send)
            return
        tenant = tenants.owner(scope)
        if tenant is None:
            challenge = {"www-authenticate": "Bearer"}
            await send_error(send, HTTPStatus.UNAUTHORIZED, "AuthenticationError", KEY_REQUIRED, challenge)
        elif (scope["method"], path) not in SERVED_ROUTES:
            message = f"{scope['method']} {path} is not served here."
            await send_error(send, HTTPStatus.NOT_FOUND, "NotFoundError", message)
        elif scope["method"] == "GET":
            await self._app(scope, receive, _for_tenant(tenant, send))
        elif (exceeded := tenants.meter.refusal(tenant, tenants.now_s())) is not None:
            await _send_exceeded(send, exceeded)
        else:
            token = tenant_of_call.set(tenant)
            try:
                await self._app(scope, receive, send)
            finally:
                tenant_of_call.reset(token)


def _for_tenant(tenant: Tenant, send: Send) -> Send:
    """Return a send function for /v1/models that leaves out what the tenant may not use."""
    starts: list[Message] = []
    parts: list[bytes] = []

    async def send_list(message: Message) -> None:
        if message["type"] == "http.response.start":
            starts.append(message)
            return
        parts.append(message.get("body", b""))
        if message.get("more_body", False):
            return
        (start,), body = starts, b"".join(parts)
        if start["status"] == HTTPStatus.OK:
            body = _own_models(tenant, body)
            others = [field for field in start["headers"] if field[0].lower() != b"content-length"]
            start["headers"] = [*others, (b"content-length", str(len(body)).encode())]
        await send(start)
        await send({"type": "http.response.body", "body": body})

    return send_list


def _own_models(tenant: Tenant, body: bytes) -> bytes:
    """Return vLLM's list of models as the tenant may see it: an adapter's root is its path on this server."""
    listed = msgspec.json.decode(body)
    listed["data"] = [
        {**card, "root": card["id"]} if card.get("parent") else card
        for card in listed["data"]
        if tenant.may_use(card["id"])
    ]
    return msgspec.json.encode(listed)


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
