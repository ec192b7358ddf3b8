"""The stream of reports to the monitor: steady ones, and phase changes at once."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

import grpc

from tailrace.cache.book import CacheBook
from tailrace.security.roles import Role
from tailrace.service.channels import Channels, format_error
from tailrace.service.reachability import Reachability
from tailrace.v1 import monitor_pb2, monitor_pb2_grpc
from worker_agent.cache_servicer import update_of
from worker_agent.carried import CarriedRequests
from worker_agent.engine.base import EngineStats
from worker_agent.load import MigrationLoad, load_of, request_report
from worker_agent.phase_events import PhaseEvents
from worker_agent.speeds import Speeds
from worker_agent.unacknowledged import Unacknowledged

log = logging.getLogger(__name__)

_BACKOFF_S: Final = (0.1, 0.2, 0.5, 1.0)
# Phase changes that come within this time are told together.
_GATHER_S: Final = 0.005
# A monitor that takes or acknowledges no report for so long is given up; the stream is opened anew.
_WRITE_S: Final = 5.0
# The same where there is another monitor. Monitors call an instance silent after two seconds by default.
_ACKNOWLEDGE_S: Final = 1.25
# A stream that has lasted so long shows that its monitor can be reached.
_LASTED_S: Final = 5.0


class _Closed(Exception):
    """The monitor ended the stream."""


class _Moved(Exception):
    """Another monitor is preferred now."""


# How a stream ends, whoever ends it.
_ENDED: Final = (grpc.aio.AioRpcError, _Closed, _Moved, TimeoutError, asyncio.InvalidStateError)


class Reports:
    """Reports for as long as `run` runs; connects again for ever. Nothing on the data path waits for it.

    One monitor is told at a time: the leading one, or the next that can be reached. Schedulers listen to all
    of them, so a worker that is cut off from one monitor alone stays what it was.
    """

    def __init__(
        self,
        instance_id: str,
        incarnation: str,
        block_tokens: int,
        stats: Callable[[], EngineStats],
        migrations: Callable[[], MigrationLoad],
        carried: CarriedRequests,
        events: PhaseEvents,
        speeds: Callable[[], Speeds | None],
        monitors: Callable[[], Sequence[str]],
        channels: Channels,
        interval_s: float,
        cache: CacheBook | None = None,
    ) -> None:
        """`monitors`: addresses of those that there are, in order of preference. `cache`: of the engine."""
        self._instance_id = instance_id
        self._incarnation = incarnation
        self._block_tokens = block_tokens
        self._stats = stats
        self._migrations = migrations
        self._carried = carried
        self._events = events
        self._speeds = speeds
        self._monitors = monitors
        self._channels = channels
        self._reachability = Reachability(channels, Role.MONITOR)
        self._interval_s = interval_s
        self._seq = 0
        self._cache = cache

    async def run(self) -> None:
        """Until cancelled."""
        failures = 0
        try:
            while True:
                address = self._best()
                if address is not None:
                    began_s = time.monotonic()
                    failed, reason = await self._attempt(address)
                    log.info("reports to the monitor at %s stopped: %s", address, reason)
                    lasted = time.monotonic() - began_s > _LASTED_S
                    if lasted:
                        self._reachability.succeeded(address)
                    if failed:
                        self._reachability.failed(address)
                    failures = failures + 1 if failed and not lasted else 0
                # Without delay to another monitor: this one's patience with us is running out.
                if self._best() in (None, address):
                    await asyncio.sleep(_BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)])
        finally:
            await self._reachability.close()

    def _best(self) -> str | None:
        """The first monitor that can be reached; when none can, the first."""
        addresses = self._monitors()
        self._reachability.keep_only(addresses)
        return next(filter(self._reachability.usable, addresses), addresses[0] if addresses else None)

    def _patience_s(self, address: str) -> float:
        """How long to wait for an acknowledgement: with another monitor at hand not until this one, to which
        we may be cut off, takes us for silent."""
        others = (other for other in self._monitors() if other != address)
        return _ACKNOWLEDGE_S if any(map(self._reachability.usable, others)) else _WRITE_S

    async def _attempt(self, address: str) -> tuple[bool, str]:
        """One stream, to its end; whether the monitor failed, and why it ended."""
        call = monitor_pb2_grpc.MonitorStub(self._channels.get(address, Role.MONITOR)).Report()
        unacknowledged = Unacknowledged()
        reading = asyncio.create_task(_acknowledged(call, unacknowledged), name="report acknowledgements")
        writing = asyncio.create_task(self._write(call, address, unacknowledged), name="reports")
        waiting = asyncio.create_task(
            unacknowledged.overdue(lambda: self._patience_s(address)), name="report deadlines"
        )
        tasks = (reading, writing, waiting)
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            call.cancel()
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception) and not isinstance(result, _ENDED):
                raise result
        if waiting in done:
            return True, "no acknowledgement in time"
        if any(isinstance(result, _Moved) for result in results):
            return False, "another monitor is to be told"
        return True, "; ".join(format_error(result) for result in results if isinstance(result, Exception))

    async def _write(
        self,
        call: grpc.aio.StreamStreamCall[monitor_pb2.WorkerReport, monitor_pb2.ReportAck],
        address: str,
        unacknowledged: Unacknowledged,
    ) -> None:
        due_s = time.monotonic()
        while True:
            steady = time.monotonic() >= due_s
            report = self._report(steady)
            unacknowledged.wrote(report.seq)
            async with asyncio.timeout(_WRITE_S):
                await call.write(report)
            if steady:
                due_s = max(due_s + self._interval_s, time.monotonic())
                if self._best() not in (None, address):
                    raise _Moved
            await self._next(due_s)

    async def _next(self, due_s: float) -> None:
        """Until there is something to tell or the next steady report is due."""
        try:
            async with asyncio.timeout(max(0.0, due_s - time.monotonic())):
                await self._events.wakeup.wait()
                await asyncio.sleep(_GATHER_S)
        except TimeoutError:
            return

    def _report(self, steady: bool) -> monitor_pb2.WorkerReport:
        self._seq += 1
        report = monitor_pb2.WorkerReport(
            instance_id=self._instance_id,
            incarnation=self._incarnation,
            seq=self._seq,
            time_s=time.time(),
        )
        if self._cache is not None:
            report.cache.CopyFrom(update_of(self._cache))
        stats = self._stats() if steady or self._events.needs_stats else None
        report.phase_events.extend(
            self._events.take(stats.requests if stats is not None else [], self._carried)
        )
        if steady and stats is not None:
            report.load.CopyFrom(load_of(stats, self._block_tokens, self._migrations(), self._speeds()))
            now_s = time.monotonic()
            report.requests.extend(
                request_report(request, self._carried.by_id(request.request_id), now_s)
                for request in stats.requests
            )
        return report


async def _acknowledged(
    call: grpc.aio.StreamStreamCall[monitor_pb2.WorkerReport, monitor_pb2.ReportAck],
    unacknowledged: Unacknowledged,
) -> None:
    """Read acknowledgements, which show that the monitor lives and hears us."""
    while isinstance(ack := await call.read(), monitor_pb2.ReportAck):
        unacknowledged.acknowledged(ack.seq)
    raise _Closed("closed by the monitor")
