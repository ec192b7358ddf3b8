"""Follows the monitor's deltas, whichever monitor leads."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

import grpc

from scheduler_svc.metrics import SchedulerMetrics
from scheduler_svc.state import ClusterState
from tailrace.service.channels import Channels
from tailrace.service.failure import failure
from tailrace.service.preferred import first_address
from tailrace.store.membership import Membership
from tailrace.v1 import monitor_pb2
from tailrace.v1.monitor_pb2_grpc import MonitorStub

log = logging.getLogger(__name__)

KIND: Final = "monitor"
_RETRY_S: Final = 0.25


class MonitorWatch:
    """Keeps the last known state while no monitor answers."""

    def __init__(
        self,
        subscriber: str,
        members: Membership,
        channels: Channels,
        state: ClusterState,
        take: Callable[[monitor_pb2.WorkerReport, float], None],
        metrics: SchedulerMetrics,
    ) -> None:
        self._subscriber = subscriber
        self._members = members
        self._channels = channels
        self._state = state
        self._take = take
        self._metrics = metrics
        self._changed = asyncio.Event()
        members.add_listener(self._changed.set)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._changed.clear()
            address = self._address()
            if address is None:
                await self._changed.wait()
                continue
            reading = asyncio.create_task(self._read(address), name=f"watch of {address}")
            try:
                await self._until_other(reading, address)
            finally:
                reading.cancel()
                await asyncio.wait([reading])
                if (error := failure(reading)) is not None:
                    # A report that we cannot take: the next watch begins with a snapshot.
                    log.error("reading the monitor at %s failed", address, exc_info=error)
                self._metrics.monitor_connected.set(0)
            await asyncio.sleep(_RETRY_S)

    async def _until_other(self, reading: asyncio.Task[None], address: str) -> None:
        """Until the reading ends or another monitor leads."""
        while not reading.done() and self._address() == address:
            self._changed.clear()
            changed = asyncio.create_task(self._changed.wait())
            try:
                await asyncio.wait([reading, changed], return_when=asyncio.FIRST_COMPLETED)
            finally:
                changed.cancel()

    def _address(self) -> str | None:
        return first_address(self._members, KIND)

    async def _read(self, address: str) -> None:
        call = MonitorStub(self._channels.get(address)).Watch(
            monitor_pb2.WatchRequest(subscriber=self._subscriber)
        )
        try:
            async for delta in call:
                if delta.snapshot:
                    log.info("watching the monitor at %s", address)
                    self._metrics.monitor_connected.set(1)
                now_s = time.monotonic()
                for report in delta.reports:
                    self._take(report, now_s)
                self._state.set_silent(delta.silent_instance_ids)
        except grpc.aio.AioRpcError as error:
            log.debug("monitor at %s: %s", address, error.code().name)
        finally:
            call.cancel()
