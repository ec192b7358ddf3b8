"""Track which services can be reached; one that failed is probed in the background, not by its callers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from typing import Final

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from tailrace.security.roles import Role
from tailrace.service.channels import Channels
from tailrace.service.tasks import cancel, run_once

log = logging.getLogger(__name__)


_CHECK_S: Final = 1.0
# Pause before a failed service is probed; longer with each failure in a row.
_PAUSE_S: Final = 0.5
_PAUSE_MAX_S: Final = 10.0


class Reachability:
    """A circuit breaker for each address of the services of one role.

    A failed address is unusable until the standard health check reports that it serves. One that fails again
    before it has worked stays unusable for longer each time, up to ten seconds: a service whose health check
    answers while its calls time out costs its callers one deadline in ten seconds.
    """

    def __init__(
        self,
        channels: Channels,
        role: Role,
        check: Callable[[grpc.aio.Channel], Awaitable[bool]] | None = None,
        pause_s: float = _PAUSE_S,
    ) -> None:
        """`check` returns whether a service serves; the standard health check by default."""
        self._channels = channels
        self._role = role
        self._check = check or is_serving
        self._pause_s = pause_s
        self._probes: dict[str, asyncio.Task[None]] = {}
        # Failures in a row by address.
        self._failures: dict[str, int] = {}
        # Cancelled probes that have not ended yet.
        self._cancelled: set[asyncio.Task[None]] = set()

    def usable(self, address: str) -> bool:
        """Return whether the address may be used now."""
        return address not in self._probes

    def failed(self, address: str) -> None:
        """Mark an address unusable after a failed call or silence."""
        if address in self._probes:
            return
        self._failures[address] = self._failures.get(address, 0) + 1
        self._probes[address] = run_once("probes of services", partial(self._probe, address), address)

    def succeeded(self, address: str) -> None:
        """Record that the address has worked."""
        self._failures.pop(address, None)

    def keep_only(self, addresses: Collection[str]) -> None:
        """Drop all other addresses: services come and go, each with another one."""
        for address in self._failures.keys() - set(addresses):
            del self._failures[address]
            if (task := self._probes.pop(address, None)) is not None:
                task.cancel()
                self._cancelled.add(task)
                task.add_done_callback(self._cancelled.discard)

    async def close(self) -> None:
        """Cancel all probes."""
        await cancel(*self._probes.values(), *self._cancelled)

    async def _probe(self, address: str) -> None:
        """Probe until the address serves."""
        failures = self._failures[address]
        try:
            while True:
                await asyncio.sleep(min(self._pause_s * 2 ** min(failures - 1, 10), _PAUSE_MAX_S))
                if await self._check(self._channels.get(address, self._role)):
                    log.info("%s answers again", address)
                    return
                failures += 1
        finally:
            if self._probes.get(address) is asyncio.current_task():
                del self._probes[address]


async def is_serving(channel: grpc.aio.Channel) -> bool:
    """Return whether the standard health check reports SERVING within a second."""
    try:
        reply = await HealthStub(channel).Check(HealthCheckRequest(), timeout=_CHECK_S)
    except grpc.aio.AioRpcError as error:
        # The server has no health service, but is reachable.
        return error.code() is grpc.StatusCode.UNIMPLEMENTED
    return bool(reply.status == HealthCheckResponse.SERVING)
