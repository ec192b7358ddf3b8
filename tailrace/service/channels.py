"""gRPC channels, one an address."""

from __future__ import annotations

import asyncio
from typing import Final

import grpc

MESSAGE_BYTES_MAX: Final = 256 * 1024 * 1024
"""Largest message either way: a step's outputs or a long prompt, with room to spare."""

_OPTIONS: Final = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    # A peer that was restarted is found again soon, not after gRPC's two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # How long one attempt to connect may take.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    # Two channels of one process to one address share no connection: a slow one does not block another's.
    ("grpc.use_local_subchannel_pool", 1),
)


class Channels:
    """A cache of insecure channels by address."""

    def __init__(self) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}

    def get(self, address: str) -> grpc.aio.Channel:
        """The channel to HOST:PORT, made at the first call; it connects by itself when used."""
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = grpc.aio.insecure_channel(address, options=_OPTIONS)
        return channel

    async def close(self) -> None:
        """Close all; calls in progress end with CANCELLED."""
        channels, self._channels = list(self._channels.values()), {}
        await asyncio.gather(*(channel.close() for channel in channels))
