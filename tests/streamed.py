"""Reading single messages of a gRPC stream."""

from __future__ import annotations

from typing import TypeVar

import grpc

RequestT = TypeVar("RequestT")
ReplyT = TypeVar("ReplyT")


async def read_message(
    call: grpc.aio.UnaryStreamCall[RequestT, ReplyT] | grpc.aio.StreamStreamCall[RequestT, ReplyT],
    kind: type[ReplyT],
) -> ReplyT:
    """Return the next message; the stream must not have ended."""
    message = await call.read()
    assert isinstance(message, kind)
    return message
