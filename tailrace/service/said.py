"""An error in one line, for a log or for another process."""

from __future__ import annotations

import grpc


def said(error: BaseException) -> str:
    """A gRPC status with its details; else the error's text, or its kind when it has none."""
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__
