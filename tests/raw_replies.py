"""Replies of gRPC services that cannot be decoded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import grpc

UNDECODABLE: Final = b"\xff"


def add_raw(add: Callable[[Any, grpc.aio.Server], None]) -> Callable[[Any, grpc.aio.Server], None]:
    """Return how to register a service by generated code whose methods may also reply with bytes."""
    return lambda servicer, server: add(servicer, _Raw(server))  # type: ignore[arg-type]


class _Raw:
    """The part of a server that generated code uses."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Leave them out: the same are registered by method."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        raw = {name: each._replace(response_serializer=_encoded) for name, each in handlers.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, raw),))


def _encoded(reply: Any) -> bytes:
    return reply if isinstance(reply, bytes) else reply.SerializeToString()
