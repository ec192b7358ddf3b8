"""Run a gRPC server with the standard health and reflection services."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from tailrace.security.transport import PLAIN, Transport
from tailrace.service.channels import MESSAGE_BYTES_MAX, PINGS
from tailrace.service.decoding import Decoding
from tailrace.service.listening import ListenError, listen_problem

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
