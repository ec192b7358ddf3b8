"""Authorize each gRPC call by the role in the caller's certificate."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

import grpc

from tailrace.security.access import allowed, denial
from tailrace.security.handlers import Context, Handler, wrap_handler
from tailrace.security.roles import Identity, NoIdentity, identity_of

log = logging.getLogger(__name__)

_URIS: Final = "peer_uri"


def caller(context: Context) -> Identity:
    """Return the caller's identity from its verified certificate. Raise NoIdentity."""
    uris = context.auth_context().get(_URIS, ())
    return identity_of(uri.decode(errors="replace") for uri in uris)


class Guard(grpc.aio.ServerInterceptor):
    """Refuse a call with PERMISSION_DENIED unless the access table lists the caller's role for its method."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """See grpc.aio.ServerInterceptor."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method

        @asynccontextmanager
        async def checked(request: object, context: Context) -> AsyncIterator[None]:
            await _check(method, context)
            yield

        return wrap_handler(handler, checked)


async def _check(method: str, context: Context) -> None:
    """Abort the call unless its caller is authorized."""
    try:
        identity = caller(context)
    except NoIdentity as error:
        reason, code = str(error), grpc.StatusCode.UNAUTHENTICATED
    else:
        if identity.role in allowed(method):
            return
        reason, code = denial(identity.role, identity.name, method), grpc.StatusCode.PERMISSION_DENIED
    log.warning("refused a call from %s: %s", context.peer(), reason)
    await context.abort(code, reason)
