"""gRPC channels to other services, the order in which to call services of a kind, and error formatting.

There is one channel per address and role.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

import grpc

from tailrace.security.renewed_channel import CLOSE_WHEN_IDLE, RenewedChannel
from tailrace.security.roles import Role
from tailrace.security.transport import PLAIN, Transport
from tailrace.service.pings import ping_options

if TYPE_CHECKING:
    from tailrace.members import Members
    from tailrace.records import ServiceRecord

Reply = TypeVar("Reply")


def format_error(error: BaseException) -> str:
    """Format a gRPC status with its details, or the error's text, or its class name if it has none."""
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__


FROM_SERVER: Final = ("tailrace-answered", "1")
"""Trailing metadata of a status that the server itself set.

UNAVAILABLE alone is ambiguous: gRPC reports it when nothing listens, and the admin API when a service that it
needs does not answer. An operator has to look in different places.
"""


def is_from_server(error: grpc.Call) -> bool:
    """Return whether the status of `error` came from the server."""
    metadata: object = error.trailing_metadata()
    return isinstance(metadata, tuple | grpc.aio.Metadata) and any(
        (key, value) == FROM_SERVER for key, value in metadata
    )


def decoded(reply: Reply | None, sender: str) -> Reply:
    """Return a reply. Raise grpc.aio.AioRpcError (INTERNAL) if it cannot be decoded.

    grpc.aio logs that, gives None in its place, and goes on with the next reply of a stream.
    """
    if reply is not None:
        return reply
    # Imported here, since commands need no metrics.
    from tailrace.telemetry.incidents import unreadable

    unreadable("reply of a service", sender, "it cannot be decoded")
    nothing = grpc.aio.Metadata()
    details = f"a reply of {sender} cannot be decoded"
    raise grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, nothing, nothing, details)


def preferred(members: Members, kind: str) -> list[ServiceRecord]:
    """Return the leader if one is known, then the others by id; each address once."""
    by_kind: dict[str, ServiceRecord] = {}
    if (leader := members.leaders.get(kind)) is not None:
        by_kind[leader.address] = leader
    for name in sorted(name for service_kind, name in members.services if service_kind == kind):
        record = members.services[kind, name]
        by_kind.setdefault(record.address, record)
    return list(by_kind.values())


def first_address(members: Members, kind: str) -> str | None:
    """Return the address to call first, or None if no such service is known."""
    return next((record.address for record in preferred(members, kind)), None)


MESSAGE_BYTES_MAX: Final = 256 * 1024 * 1024
"""Largest message either way: a step's outputs or a long prompt, with room to spare."""

PINGS: Final = ping_options(10.0, 5.0)
"""Options of every connection between our processes, for channels and servers."""

_OPTIONS: Final = (
    *PINGS,
    # Reconnect to a restarted peer soon, not after gRPC's default of up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Timeout of one connection attempt.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    # Two channels of one process to one address share no connection, so that a slow one does not block the
    # other.
    ("grpc.use_local_subchannel_pool", 1),
    CLOSE_WHEN_IDLE,
)


# Members come and go, each with another port: channels unused for this long and not connected are closed. A
# call in progress keeps its channel connected.
_UNUSED_S: Final = 600.0


@dataclass(slots=True)
class _CachedChannel:
    channel: RenewedChannel
    last_used_s: float


class Channels:
    """Cache channels by address and role."""

    def __init__(self, transport: Transport = PLAIN, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds."""
        self.transport = transport
        self._clock = clock
        self._channels: dict[tuple[str, Role], _CachedChannel] = {}

    def __len__(self) -> int:
        return len(self._channels)

    def get(self, address: str, role: Role) -> grpc.aio.Channel:
        """Return the channel to a process of the role at HOST:PORT; it connects by itself when used.

        Do not keep it: call this for each RPC.
        """
        now_s = self._clock()
        cached = self._channels.get((address, role))
        if cached is None:
            self._drop_unused(now_s)
            transport = self.transport
            channel = RenewedChannel(
                lambda: transport.channel(address, role, _OPTIONS), lambda: transport.version
            )
            cached = self._channels[address, role] = _CachedChannel(channel, now_s)
        cached.last_used_s = now_s
        return cached.channel.get()

    async def close(self) -> None:
        """Close all channels; calls in progress end with CANCELLED."""
        channels, self._channels = list(self._channels.values()), {}
        await asyncio.gather(*(cached.channel.close() for cached in channels))

    def _drop_unused(self, now_s: float) -> None:
        """Drop unused channels; one without references closes itself."""
        self._channels = {
            key: cached
            for key, cached in self._channels.items()
            if now_s - cached.last_used_s <= _UNUSED_S or cached.channel.connected
        }
