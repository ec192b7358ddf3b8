"""Answer requests that cannot be decoded with INVALID_ARGUMENT, and count calls that fail unexpectedly.

By default gRPC reports UNKNOWN for both, as if the server were broken, and logs a traceback for each.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import grpc
from google.protobuf.message import DecodeError

from tailrace.security.handlers import (
    Behavior,
    CallWrapper,
    Context,
    Deserializer,
    Handler,
    behavior_of,
    rebuild_handler,
    wrap_handler,
)
from tailrace.telemetry.incidents import loop_failed, loop_named

_CALLS: Final = loop_named("gRPC calls")


@dataclass(frozen=True, slots=True)
class _Undecodable:
    """Stands for a request that could not be decoded."""

    reason: str


class Decoding(grpc.aio.ServerInterceptor):
    """End a call at the first request that cannot be decoded; the handler does not see that one.

    An exception that a handler did not foresee is counted as one of the loop `_CALLS`.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Wrap the handler; see grpc.aio.ServerInterceptor."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        behavior = behavior_of(wrap_handler(handler, _checked(handler_call_details.method)))
        if handler.request_streaming:
            behavior = _until_undecodable(behavior)
        return rebuild_handler(handler, behavior, _lenient(handler.request_deserializer))


def _lenient(deserializer: Deserializer) -> Deserializer:
    def read(data: bytes) -> object:
        try:
            return deserializer(data)
        except DecodeError as error:
            return _Undecodable(str(error))

    return read


class _Requests:
    """Iterate over a call's requests until the first that cannot be decoded, which is kept."""

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


def _checked(method: str) -> CallWrapper:
    @asynccontextmanager
    async def check(request: object, context: Context) -> AsyncIterator[None]:
        if isinstance(request, _Undecodable):
            await _refuse(context, request)
        try:
            yield
        except (grpc.aio.AbortError, grpc.aio.InternalError, NotImplementedError):
            # The status that the handler gives, a caller that has gone, or a method of a later version.
            raise
        except Exception as error:
            loop_failed(_CALLS, method, error)
            raise
        # The handler saw the end of the requests; once it has returned, tell the caller why.
        if isinstance(request, _Requests) and request.undecodable is not None:
            await _refuse(context, request.undecodable)

    return check


async def _refuse(context: Context, request: _Undecodable) -> None:
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the request cannot be decoded: {request.reason}")
