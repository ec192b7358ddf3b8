"""A gRPC channel that is replaced when this process's certificate changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import grpc

CLOSE_WHEN_IDLE: Final = ("grpc.client_idle_timeout_ms", 60_000)
"""Option of every channel that can be replaced: otherwise gRPC keeps its connection for half an hour after
the last call."""


class RenewedChannel:
    """Start each call on the newest channel; calls in progress finish on the channel they started on.

    A replaced channel is kept while it is connected; with CLOSE_WHEN_IDLE that ends soon after its last call.
    """

    def __init__(self, make: Callable[[], grpc.aio.Channel], version: Callable[[], int]) -> None:
        """`make` opens a channel; `version` returns a number that changes with the certificate."""
        self._make = make
        self._version = version
        self._made_version = version()
        self._channel = make()
        self._replaced: list[grpc.aio.Channel] = []

    def get(self) -> grpc.aio.Channel:
        """Return the channel for a new call; it connects on demand. Do not keep it across calls."""
        version = self._version()
        if version != self._made_version:
            self._made_version = version
            self._replaced = [channel for channel in self._replaced if _connected(channel)]
            self._replaced.append(self._channel)
            self._channel = self._make()
        return self._channel

    @property
    def connected(self) -> bool:
        """Return whether any of its connections is up."""
        return any(map(_connected, (self._channel, *self._replaced)))

    async def close(self) -> None:
        """Close all channels; calls in progress end with CANCELLED."""
        await asyncio.gather(*(channel.close() for channel in (self._channel, *self._replaced)))


def _connected(channel: grpc.aio.Channel) -> bool:
    return channel.get_state() is grpc.ChannelConnectivity.READY
