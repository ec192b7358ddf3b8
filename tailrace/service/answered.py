"""Tell a status that a server chose from one that gRPC made up because no server answered."""

from __future__ import annotations

from typing import Final

import grpc

ANSWERED: Final = ("tailrace-answered", "1")
"""Trailing metadata of a status that the server chose.

UNAVAILABLE alone does not tell: gRPC gives it when nothing listens, and the admin API gives it when a service
that it needs does not answer. An operator must look in different places.
"""


def server_answered(error: grpc.Call) -> bool:
    """Return whether the status of `error` came from the server."""
    metadata: object = error.trailing_metadata()
    return isinstance(metadata, tuple | grpc.aio.Metadata) and any(
        (key, value) == ANSWERED for key, value in metadata
    )
