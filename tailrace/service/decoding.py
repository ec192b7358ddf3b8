"""A request that cannot be decoded is its sender's mistake: INVALID_ARGUMENT.

Left to itself gRPC says UNKNOWN, as if the server were broken, and logs a traceback for each.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
from google.protobuf.message import DecodeError

from tailrace.security.handlers import (
    Behavior,
    Context,
    Deserializer,
    Handler,
    behavior_of,
    rebuilt,
    wrap_handler,
)


@dataclass(frozen=True, slots=True)
class _Undecodable:
    """In place of a request; the text says what was wrong with it."""

    reason: str


class Decoding(grpc.aio.ServerInterceptor):
    """Ends a call at the first request that cannot be decoded. Its handler does not see that one."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """See grpc.aio.ServerInterceptor."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        behavior = behavior_of(wrap_handler(handler, _decoded))
        if handler.request_streaming:
            behavior = _until_undecodable(behavior)
        return rebuilt(handler, behavior, _lenient(handler.request_deserializer))


def _lenient(deserializer: Deserializer) -> Deserializer:
    def read(data: bytes) -> object:
        try:
            return deserializer(data)
        except DecodeError as error:
            return _Undecodable(str(error))

    return read


class _Requests:
    """A call's requests up to the first that cannot be decoded, which is kept."""

    def __init__(self, requests: AsyncIterator[object]) -> None:
        self._requests = requests
        self.undecodable: _Undecodable | None = None

    def __aiter__(self) -> AsyncIterator[object]:
        return self

    async def __anext__(self) -> object:
        if self.undecodable is not None:
            raise StopAsyncIteration
        request = await anext(self._requests)
        if isinstance(request, _Undecodable):
            self.undecodable = request
            raise StopAsyncIteration
        return request


def _until_undecodable(behavior: Behavior) -> Behavior:
    async def serve(requests: AsyncIterator[object], context: Context) -> object:
        return await behavior(_Requests(aiter(requests)), context)

    return serve


@asynccontextmanager
async def _decoded(request: object, context: Context) -> AsyncIterator[None]:
    if isinstance(request, _Undecodable):
        await _refuse(context, request)
    yield
    # For the handler the requests have ended; once it has, too, the caller is told why.
    if isinstance(request, _Requests) and request.undecodable is not None:
        await _refuse(context, request.undecodable)


async def _refuse(context: Context, request: _Undecodable) -> None:
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the request is no message: {request.reason}")
