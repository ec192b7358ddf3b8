"""Checks each gRPC call by the caller's certificate."""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, cast

import grpc

from tailrace.security.access import allowed, denial
from tailrace.security.roles import Identity, NoIdentity, identity_of

log = logging.getLogger(__name__)

_Context = grpc.aio.ServicerContext[Any, Any]
# gRPC's handlers are untyped: they take a request or an iterator of them, and give a reply, an iterator of
# replies, or nothing.
_Behavior = Callable[[Any, _Context], Any]

_URIS: Final = "peer_uri"


def caller(context: _Context) -> Identity:
    """Who calls, by its certificate, which the connection has verified. Raises NoIdentity."""
    found = context.auth_context().get(_URIS, ())
    return identity_of(uri.decode(errors="replace") for uri in found)


class Guard(grpc.aio.ServerInterceptor):
    """Refuses a call with PERMISSION_DENIED unless the table of methods has the caller's role."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """See grpc.aio.ServerInterceptor."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        return _guarded(handler_call_details.method, handler)


def _guarded(method: str, handler: grpc.RpcMethodHandler[Any, Any]) -> grpc.RpcMethodHandler[Any, Any]:
    wrap = _streaming if handler.response_streaming else _single
    make: Callable[..., grpc.RpcMethodHandler[Any, Any]]
    behavior: object
    match (handler.request_streaming, handler.response_streaming):
        case (False, False):
            make, behavior = grpc.unary_unary_rpc_method_handler, handler.unary_unary
        case (False, True):
            make, behavior = grpc.unary_stream_rpc_method_handler, handler.unary_stream
        case (True, False):
            make, behavior = grpc.stream_unary_rpc_method_handler, handler.stream_unary
        case _:
            make, behavior = grpc.stream_stream_rpc_method_handler, handler.stream_stream
    return make(
        wrap(method, cast(_Behavior, behavior)),
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )


def _single(method: str, behavior: _Behavior) -> _Behavior:
    async def checked(request: object, context: _Context) -> object:
        await _check(method, context)
        return await behavior(request, context)

    return checked


def _streaming(method: str, behavior: _Behavior) -> _Behavior:
    if inspect.isasyncgenfunction(behavior):

        async def checked_replies(request: object, context: _Context) -> AsyncIterator[object]:
            await _check(method, context)
            async for reply in behavior(request, context):
                yield reply

        return checked_replies
    # It writes its replies through the context.
    return _single(method, behavior)


async def _check(method: str, context: _Context) -> None:
    """Aborts the call."""
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
