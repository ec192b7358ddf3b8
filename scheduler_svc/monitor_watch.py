"""What the monitors tell: several streams of reports, made one."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Final

import grpc

from scheduler_svc.metrics import SchedulerMetrics
from tailrace.control.reported_cluster import ReportedCluster
from tailrace.security.roles import Role
from tailrace.service.channels import Channels, preferred
from tailrace.service.tasks import task_error
from tailrace.store.membership import Membership
from tailrace.v1 import monitor_pb2
from tailrace.v1.monitor_pb2_grpc import MonitorStub

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Latest:
    """The latest report of an instance that was taken, and which monitor told it."""

    incarnation: str
    seq: int
    monitor: str


class MergedReports:
    """Which reports are news, and who is silent.

    A worker tells one monitor at a time. When it turns to another, the one before goes on holding its last
    report, sends it to who watches anew, and soon calls the worker silent.
    """

    def __init__(self) -> None:
        self._latest: dict[str, _Latest] = {}
        # By monitor that is connected: whom it has heard of, and who of these is silent to it.
        self._heard: dict[str, set[str]] = {}
        self._silent: dict[str, frozenset[str]] = {}

    @property
    def connected(self) -> bool:
        """Whether any monitor tells us anything."""
        return bool(self._silent)

    @property
    def silent(self) -> frozenset[str]:
        """Instances that no connected monitor hears, of those that one has heard of."""
        named = frozenset[str]().union(*self._silent.values())
        return frozenset(
            name
            for name in named
            if all(name in silent for monitor, silent in self._silent.items() if name in self._heard[monitor])
        )

    def fresh(self, monitor: str, delta: monitor_pb2.StateDelta) -> Iterator[monitor_pb2.WorkerReport]:
        """Take a monitor's delta in; those of its reports that are news."""
        heard = self._heard.setdefault(monitor, set())
        if delta.snapshot:
            heard.clear()
        self._silent[monitor] = frozenset(delta.silent_instance_ids)
        for report in delta.reports:
            heard.add(report.instance_id)
            if self._is_news(monitor, report):
                yield report

    def disconnected(self, monitor: str) -> None:
        """The monitor tells nothing any more."""
        self._heard.pop(monitor, None)
        self._silent.pop(monitor, None)

    def keep_only(self, instance_ids: Collection[str]) -> None:
        """Forget instances that have left."""
        for name in self._latest.keys() - set(instance_ids):
            del self._latest[name]

    def _is_news(self, monitor: str, report: monitor_pb2.WorkerReport) -> bool:
        latest = self._latest.get(report.instance_id)
        if latest is not None and latest.incarnation == report.incarnation:
            # Of the same monitor all is news, also what it tells again in a snapshot: with events merged in.
            if latest.monitor != monitor and report.seq <= latest.seq:
                return False
            latest.seq, latest.monitor = max(latest.seq, report.seq), monitor
            return True
        self._latest[report.instance_id] = _Latest(report.incarnation, report.seq, monitor)
        return True


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
                if (error := task_error(reading)) is not None:
                    # A report that we cannot take: the next watch begins with a snapshot.
                    log.error("reading the monitor at %s failed", address, exc_info=error)
                self._merged.disconnected(address)
                self._update_silent()
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
                self._update_silent()
        except grpc.aio.AioRpcError as error:
            log.debug("monitor at %s: %s", address, error.code().name)
        finally:
            call.cancel()

    def _update_silent(self) -> None:
        self._metrics.monitor_connected.set(float(self._merged.connected))
        # Without a monitor nobody knows who is silent: what was known holds.
        if self._merged.connected:
            self._state.set_silent(self._merged.silent)


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
