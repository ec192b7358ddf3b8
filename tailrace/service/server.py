"""Run a gRPC server with the standard health and reflection services."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

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
from tailrace.security.transport import PLAIN, Transport
from tailrace.service.channels import MESSAGE_BYTES_MAX, PINGS
from tailrace.service.sockets import ListenError, listen_problem
from tailrace.telemetry.incidents import loop_failed, loop_named

_OPTIONS: Final = (
    # Otherwise a second process on the same port would silently share it.
    ("grpc.so_reuseport", 0),
    *PINGS,
    # Allow the pings of our own channels.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    # Time for a client to complete the TLS handshake.
    ("grpc.server_handshake_timeout_ms", 5_000),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
)
_GRACE_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Servicer:
    """One service: the generated `add_XServicer_to_server`, the object, and its full name."""

    # Each generated function takes its own servicer class; they have no common type.
    add: Callable[[Any, grpc.aio.Server], None]
    servicer: object
    name: str


class GrpcServer:
    """Handle of a running server."""

    def __init__(
        self, address: str, health_servicer: health.aio.HealthServicer, names: Sequence[str]
    ) -> None:
        # HOST:PORT as listened on, with the actual port.
        self.address = address
        self._health = health_servicer
        self._names = ("", *names)

    async def set_serving(self, serving: bool) -> None:
        """Set what the standard health check reports for every service."""
        status = health_pb2.HealthCheckResponse
        for name in self._names:
            await self._health.set(name, status.SERVING if serving else status.NOT_SERVING)


@asynccontextmanager
async def serve_grpc(
    listen: str,
    servicers: Sequence[Servicer],
    transport: Transport = PLAIN,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    inner: Sequence[grpc.aio.ServerInterceptor] = (),
) -> AsyncIterator[GrpcServer]:
    """Serve on HOST:PORT (--listen; port 0: any free one) until the block ends; SERVING from the start.

    `interceptors` see calls before authorization, `inner` only authorized ones. At the end the health check
    reports NOT_SERVING, calls get half a second, and are then cancelled. Raise ListenError if the address is
    in use or invalid.
    """
    layers = [*interceptors, *transport.interceptors(), Decoding(), *inner]
    server = grpc.aio.server(options=_OPTIONS, interceptors=layers)
    for servicer in servicers:
        servicer.add(servicer.servicer, server)
    names = [servicer.name for servicer in servicers]
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    try:
        port = transport.listen(server, listen)
    except RuntimeError as error:
        reason = listen_problem(listen) or "gRPC refused the address"
        raise ListenError.of("--listen", listen, reason) from error
    handle = GrpcServer(f"{listen.rpartition(':')[0]}:{port}", health_servicer, names)
    await server.start()
    try:
        await handle.set_serving(True)
        yield handle
    finally:
        await handle.set_serving(False)
        await server.stop(_GRACE_S)


# Answer requests that cannot be decoded with INVALID_ARGUMENT, and count calls that fail unexpectedly.
#
# By default gRPC reports UNKNOWN for both, as if the server were broken, and logs a traceback for each.

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
