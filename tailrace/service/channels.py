"""Calls of other services: channels to them, which of a kind to ask first, and what their errors tell.

gRPC channels are one an address and role.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import grpc

from tailrace.records import ServiceRecord
from tailrace.security.renewed_channel import RenewedChannel
from tailrace.security.roles import Role
from tailrace.security.transport import PLAIN, Transport


def format_error(error: BaseException) -> str:
    """A gRPC status with its details; else the error's text, or its kind when it has none."""
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__


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


class Services(Protocol):
    """The part of tailrace.store.membership.Membership that is used here."""

    @property
    def services(self) -> Mapping[tuple[str, str], ServiceRecord]: ...
    @property
    def leaders(self) -> Mapping[str, ServiceRecord]: ...


def preferred(members: Services, kind: str) -> list[ServiceRecord]:
    """The leader, if one is known, then the others by id; each address once."""
    found: dict[str, ServiceRecord] = {}
    if (leader := members.leaders.get(kind)) is not None:
        found[leader.address] = leader
    for (each, _), record in sorted(members.services.items(), key=_key):
        if each == kind:
            found.setdefault(record.address, record)
    return list(found.values())


def first_address(members: Services, kind: str) -> str | None:
    """Where to ask first; None: no such service is known."""
    return next((record.address for record in preferred(members, kind)), None)


def _key(item: tuple[tuple[str, str], ServiceRecord]) -> tuple[str, str]:
    return item[0]


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
    # What a new certificate has replaced goes soon after its last call.
    ("grpc.client_idle_timeout_ms", 60_000),
)


# Members come and go, each with another port: what nobody has asked for in so long, and is not connected, is
# closed. A call under way keeps its channel connected.
_FORGET_S: Final = 600.0


@dataclass(slots=True)
class _Kept:
    channel: RenewedChannel
    asked_s: float


class Channels:
    """A cache of channels by address and role."""

    def __init__(self, transport: Transport = PLAIN, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds."""
        self.transport = transport
        self._clock = clock
        self._channels: dict[tuple[str, Role], _Kept] = {}

    def __len__(self) -> int:
        return len(self._channels)

    def get(self, address: str, role: Role) -> grpc.aio.Channel:
        """The channel to a process of the role at HOST:PORT, made at the first call; it connects by itself
        when used.

        Not to be kept: ask again for each call.
        """
        now_s = self._clock()
        kept = self._channels.get((address, role))
        if kept is None:
            self._forget(now_s)
            transport = self.transport
            channel = RenewedChannel(
                lambda: transport.channel(address, role, _OPTIONS), lambda: transport.version
            )
            kept = self._channels[address, role] = _Kept(channel, now_s)
        kept.asked_s = now_s
        return kept.channel.get()

    async def close(self) -> None:
        """Close all; calls in progress end with CANCELLED."""
        channels, self._channels = list(self._channels.values()), {}
        await asyncio.gather(*(kept.channel.close() for kept in channels))

    def _forget(self, now_s: float) -> None:
        """A channel without references closes itself."""
        self._channels = {
            key: kept
            for key, kept in self._channels.items()
            if now_s - kept.asked_s <= _FORGET_S or kept.channel.connected
        }
