"""Reading a stream of gRPC message by message."""

from __future__ import annotations

from typing import TypeVar

import grpc

Asked = TypeVar("Asked")
Told = TypeVar("Told")


async def next_of(call: grpc.aio.UnaryStreamCall[Asked, Told], kind: type[Told]) -> Told:
    """The next message; the stream has not ended."""
    message = await call.read()
    assert isinstance(message, kind)
    return message
