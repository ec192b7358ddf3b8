"""gRPC handlers with something around them, of all four kinds and in both ways to write one."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any, TypeAlias, cast

import grpc

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Around: TypeAlias = "Callable[[object, Context], AbstractAsyncContextManager[None]]"
"""What is entered before a call, with its request (or the iterator of its requests), and left after it."""

# gRPC's handlers are untyped: they take a request or an iterator of them, and give a reply, an iterator of
# replies, or nothing.
Behavior: TypeAlias = "Callable[[Any, Context], Any]"
Deserializer: TypeAlias = "Callable[[bytes], Any]"


def wrap_handler(handler: Handler, around: Around) -> Handler:
    """The handler with `around` about each of its calls."""
    return rebuild_handler(handler, _wrapped(behavior_of(handler), around), handler.request_deserializer)


def behavior_of(handler: Handler) -> Behavior:
    """The function that serves its calls, whichever of the four kinds it is of."""
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
    """A handler of the same kind with another behavior, and another way to read its requests."""
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


def _wrapped(behavior: Behavior, around: Around) -> Behavior:
    if inspect.isasyncgenfunction(behavior):
        # Written through the context, not yielded: gRPC leaves a generator whose caller is gone to the
        # garbage collection, and by then the call no longer exists.
        async def replies(request: object, context: Context) -> None:
            async with around(request, context), aclosing(behavior(request, context)) as stream:
                async for reply in stream:
                    await _write(context, reply)

        return replies

    # With one reply, or with replies that it writes through the context.
    async def reply(request: object, context: Context) -> object:
        async with around(request, context):
            return await behavior(request, context)

    return reply


async def _write(context: Context, reply: object) -> None:
    try:
        await context.write(reply)
    except grpc.aio.InternalError as error:
        # gRPC knows that the caller is gone, and has not cancelled the handler yet.
        raise asyncio.CancelledError from error
