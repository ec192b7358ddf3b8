"""A gRPC channel that is made anew when this process's certificate changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc


class RenewedChannel:
    """Calls begin on the newest channel; those under way end on the one that they began on.

    A channel that has been replaced is kept while it is connected: gRPC takes an unused one's connection down
    after `grpc.client_idle_timeout_ms`.
    """

    def __init__(self, make: Callable[[], grpc.aio.Channel], version: Callable[[], int]) -> None:
        """`version` changes with the certificate."""
        self._make = make
        self._version = version
        self._made_version = version()
        self._channel = make()
        self._replaced: list[grpc.aio.Channel] = []

    def get(self) -> grpc.aio.Channel:
        """The channel for a new call; it connects by itself. Not to be kept."""
        version = self._version()
        if version != self._made_version:
            self._made_version = version
            self._replaced = [channel for channel in self._replaced if _connected(channel)]
            self._replaced.append(self._channel)
            self._channel = self._make()
        return self._channel

    @property
    def connected(self) -> bool:
        """Whether any of its connections is up."""
        return any(map(_connected, (self._channel, *self._replaced)))

    async def close(self) -> None:
        """Close all; calls under way end with CANCELLED."""
        await asyncio.gather(*(channel.close() for channel in (self._channel, *self._replaced)))


def _connected(channel: grpc.aio.Channel) -> bool:
    return channel.get_state() is grpc.ChannelConnectivity.READY
