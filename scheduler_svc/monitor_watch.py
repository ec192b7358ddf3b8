"""Watch all monitors and merge their streams of worker reports into one."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Final

import grpc

from scheduler_svc.metrics import SchedulerMetrics
from tailrace.control.events import ReportsStopped
from tailrace.control.report_numbers import check_size, clear_wrong_numbers
from tailrace.control.reported_cluster import ReportedCluster
from tailrace.security.roles import Role
from tailrace.service.channels import Channels, decoded, preferred
from tailrace.service.tasks import cancel, in_slices, run_once, supervise
from tailrace.store.membership import Membership
from tailrace.telemetry.incidents import unreadable
from tailrace.v1 import monitor_pb2

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _LatestReport:
    """The latest accepted report of an instance, and the monitor that sent it."""

    incarnation: str
    seq: int
    monitor: str


class MergedReports:
    """Decide which reports are new and which instances are silent.

    A worker reports to one monitor at a time. When it switches, the previous monitor keeps its last report,
    sends it to new subscribers, and soon declares the worker silent.
    """

    def __init__(self) -> None:
        self._latest: dict[str, _LatestReport] = {}
        # By connected monitor: the instances that it knows, and those of them that are silent to it.
        self._reporting: dict[str, set[str]] = {}
        self._silent: dict[str, frozenset[str]] = {}

    @property
    def connected(self) -> bool:
        """Return whether any monitor is connected."""
        return bool(self._silent)

    @property
    def silent(self) -> frozenset[str]:
        """Return instances that are silent to every connected monitor that knows them."""
        named = frozenset[str]().union(*self._silent.values())
        return frozenset(
            name
            for name in named
            if all(
                name in silent for monitor, silent in self._silent.items() if name in self._reporting[monitor]
            )
        )

    def end_delta(self, monitor: str, delta: monitor_pb2.EncodedDelta, reported: set[str]) -> None:
        """Apply what a monitor's delta says besides its reports, which were of the instances `reported`."""
        if delta.snapshot or monitor not in self._reporting:
            self._reporting[monitor] = reported
        else:
            self._reporting[monitor].update(reported)
        self._silent[monitor] = frozenset(delta.silent_instance_ids)

    def disconnected(self, monitor: str) -> None:
        """Remove a monitor whose watch has ended."""
        self._reporting.pop(monitor, None)
        self._silent.pop(monitor, None)

    def keep_only(self, instance_ids: Collection[str]) -> None:
        """Drop instances that have left the cluster."""
        for name in self._latest.keys() - set(instance_ids):
            del self._latest[name]

    def is_new(self, monitor: str, report: monitor_pb2.WorkerReport) -> bool:
        """Apply the next report from a monitor; return whether it is new."""
        latest = self._latest.get(report.instance_id)
        if latest is not None and latest.incarnation == report.incarnation:
            # From the same monitor every report is new, even one repeated in a snapshot: it includes the
            # events since.
            if latest.monitor != monitor and report.seq <= latest.seq:
                return False
            latest.seq, latest.monitor = max(latest.seq, report.seq), monitor
            return True
        self._latest[report.instance_id] = _LatestReport(report.incarnation, report.seq, monitor)
        return True


KIND: Final = "monitor"
_RETRY_S: Final = 0.25
# Their name as loops.
_WATCHES: Final = "monitor watches"
# Its name among what can be unreadable.
_REPORT: Final = "report of a worker"
_WATCH: Final = "/tailrace.v1.Monitor/Watch"


class MonitorWatch:
    """Feed reports to the scheduler; while no monitor answers, the last known state is kept."""

    def __init__(
        self,
        subscriber: str,
        members: Membership,
        channels: Channels,
        state: ReportedCluster,
        on_report: Callable[[monitor_pb2.WorkerReport, float], None],
        metrics: SchedulerMetrics,
    ) -> None:
        self._subscriber = subscriber
        self._members = members
        self._channels = channels
        self._state = state
        self._on_report = on_report
        self._metrics = metrics
        self._merged = MergedReports()
        self._changed = asyncio.Event()
        members.add_listener(self._changed.set)

    async def run(self) -> None:
        """Run until cancelled."""
        watches: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                self._changed.clear()
                addresses = {record.address for record in preferred(self._members, KIND)}
                for address in addresses - watches.keys():
                    watches[address] = supervise(_WATCHES, partial(self._watch, address), address)
                removed = [watches.pop(address) for address in watches.keys() - addresses]
                await cancel(*removed)
                self._merged.keep_only(self._members.instances.keys())
                await self._changed.wait()
        finally:
            await cancel(*watches.values())

    async def _watch(self, address: str) -> None:
        """Watch one monitor until cancelled."""
        while True:
            # A task of its own: gRPC cancels a call whose channel is replaced.
            reading = run_once(_WATCHES, partial(self._read, address), address)
            try:
                await asyncio.wait([reading])
            finally:
                # If it failed, the next watch begins with a snapshot.
                await cancel(reading)
                self._merged.disconnected(address)
                self._update_silent()
            await asyncio.sleep(_RETRY_S)

    async def _read(self, address: str) -> None:
        watch = self._channels.get(address, Role.MONITOR).unary_stream(
            _WATCH,
            request_serializer=monitor_pb2.WatchRequest.SerializeToString,
            response_deserializer=monitor_pb2.EncodedDelta.FromString,
        )
        call = watch(monitor_pb2.WatchRequest(subscriber=self._subscriber))
        try:
            async for reply in call:
                delta = decoded(reply, f"the monitor at {address}")
                if delta.snapshot:
                    log.info("watching the monitor at %s", address)
                await self._take(address, delta)
        except grpc.aio.AioRpcError as error:
            log.debug("monitor at %s: %s", address, error.code().name)
        finally:
            call.cancel()

    async def _take(self, address: str, delta: monitor_pb2.EncodedDelta) -> None:
        """Process a delta report by report; between slices of it, waiting placements get their turn."""
        reported: set[str] = set()
        async for encoded in in_slices(delta.reports):
            instance_id = ""
            try:
                report = monitor_pb2.WorkerReport.FromString(encoded)
                instance_id = report.instance_id
                reported.add(instance_id)
                check_size(report)
                if self._merged.is_new(address, report):
                    if wrong := clear_wrong_numbers(report):
                        which = f"{', '.join(wrong)} of {instance_id} by {address}"
                        unreadable(_REPORT, which, "not finite, negative or too large")
                    self._on_report(report, time.monotonic())
            except Exception as error:  # noqa: BLE001 - whatever a worker's bytes lead to
                unreadable(_REPORT, f"{instance_id or 'without a name'} by {address}", error)
        self._merged.end_delta(address, delta, reported)
        self._update_silent()

    def _update_silent(self) -> None:
        self._metrics.monitor_connected.set(float(self._merged.connected))
        # Without a monitor it is unknown who is silent; the last known state is kept.
        if self._merged.connected:
            self._state.apply(ReportsStopped(sorted(self._merged.silent)))
