"""Follows every monitor's deltas: a worker tells one of them, whichever it can reach."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

import grpc

from scheduler_svc.merged_reports import MergedReports
from scheduler_svc.metrics import SchedulerMetrics
from tailrace.control.reported_cluster import ReportedCluster
from tailrace.security.roles import Role
from tailrace.service.channels import Channels
from tailrace.service.failure import failure
from tailrace.service.preferred import preferred
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
        state: ReportedCluster,
        take: Callable[[monitor_pb2.WorkerReport, float], None],
        metrics: SchedulerMetrics,
    ) -> None:
        self._subscriber = subscriber
        self._members = members
        self._channels = channels
        self._state = state
        self._take = take
        self._metrics = metrics
        self._merged = MergedReports()
        self._changed = asyncio.Event()
        members.add_listener(self._changed.set)

    async def run(self) -> None:
        """Until cancelled."""
        watches: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                self._changed.clear()
                addresses = {record.address for record in preferred(self._members, KIND)}
                for address in addresses - watches.keys():
                    watches[address] = asyncio.create_task(self._watch(address), name=f"watch of {address}")
                gone = [watches.pop(address) for address in watches.keys() - addresses]
                await _end(gone)
                self._merged.keep_only(self._members.instances.keys())
                await self._changed.wait()
        finally:
            await _end(list(watches.values()))

    async def _watch(self, address: str) -> None:
        """One monitor, until cancelled."""
        while True:
            reading = asyncio.create_task(self._read(address), name=f"reading {address}")
            try:
                await asyncio.wait([reading])
            finally:
                await _end([reading])
                if (error := failure(reading)) is not None:
                    # A report that we cannot take: the next watch begins with a snapshot.
                    log.error("reading the monitor at %s failed", address, exc_info=error)
                self._merged.disconnected(address)
                self._tell()
            await asyncio.sleep(_RETRY_S)

    async def _read(self, address: str) -> None:
        call = MonitorStub(self._channels.get(address, Role.MONITOR)).Watch(
            monitor_pb2.WatchRequest(subscriber=self._subscriber)
        )
        try:
            async for delta in call:
                if delta.snapshot:
                    log.info("watching the monitor at %s", address)
                now_s = time.monotonic()
                for report in self._merged.fresh(address, delta):
                    self._take(report, now_s)
                self._tell()
        except grpc.aio.AioRpcError as error:
            log.debug("monitor at %s: %s", address, error.code().name)
        finally:
            call.cancel()

    def _tell(self) -> None:
        self._metrics.monitor_connected.set(float(self._merged.connected))
        # Without a monitor nobody knows who is silent: what was known holds.
        if self._merged.connected:
            self._state.set_silent(self._merged.silent)


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
