"""Wrap gRPC method handlers in an asynchronous context manager.

Covers all four kinds of method (unary or streaming requests and replies), and both ways to write a streaming
one: as an asynchronous generator, or by writing replies to the context.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any, TypeAlias, cast

import grpc

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
CallWrapper: TypeAlias = "Callable[[object, Context], AbstractAsyncContextManager[None]]"
"""Makes the context manager that is entered before a call and left after it.

Its first argument is the call's request, or the iterator of its requests.
"""

# gRPC's handlers are untyped: they take a request or an iterator of requests, and return a reply, an iterator
# of replies, or nothing.
Behavior: TypeAlias = "Callable[[Any, Context], Any]"
Deserializer: TypeAlias = "Callable[[bytes], Any]"


def wrap_handler(handler: Handler, wrapper: CallWrapper) -> Handler:
    """Return a handler that runs each call of `handler` inside `wrapper`."""
    return rebuild_handler(handler, _wrapped(behavior_of(handler), wrapper), handler.request_deserializer)


def behavior_of(handler: Handler) -> Behavior:
    """Return the function that serves the handler's calls, whichever of the four kinds it is."""
    match (handler.request_streaming, handler.response_streaming):
        case (False, False):
            behavior: object = handler.unary_unary
        case (False, True):
            behavior = handler.unary_stream
        case (True, False):
            behavior = handler.stream_unary
        case _:
            behavior = handler.stream_stream
    return cast(Behavior, behavior)


def rebuild_handler(handler: Handler, behavior: Behavior, deserializer: Deserializer | None) -> Handler:
    """Return a handler of the same kind with another behavior and another request deserializer."""
    make: Callable[..., Handler]
    match (handler.request_streaming, handler.response_streaming):
        case (False, False):
            make = grpc.unary_unary_rpc_method_handler
        case (False, True):
            make = grpc.unary_stream_rpc_method_handler
        case (True, False):
            make = grpc.stream_unary_rpc_method_handler
        case _:
            make = grpc.stream_stream_rpc_method_handler
    return make(behavior, request_deserializer=deserializer, response_serializer=handler.response_serializer)


def _wrapped(behavior: Behavior, wrapper: CallWrapper) -> Behavior:
    if inspect.isasyncgenfunction(behavior):
        # Replies are written to the context and not yielded: when the caller disconnects, gRPC leaves the
        # generator to the garbage collector, which finalizes it after the call has ceased to exist.
        async def replies(request: object, context: Context) -> None:
            async with wrapper(request, context), aclosing(behavior(request, context)) as stream:
                async for reply in stream:
                    await _write(context, reply)

        return replies

    # A single reply, or replies that the behavior writes to the context itself.
    async def reply(request: object, context: Context) -> object:
        async with wrapper(request, context):
            return await behavior(request, context)

    return reply


async def _write(context: Context, reply: object) -> None:
    try:
        await context.write(reply)
    except grpc.aio.InternalError as error:
        # The caller has disconnected, but gRPC has not cancelled the handler yet.
        raise asyncio.CancelledError from error
