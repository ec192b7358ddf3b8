"""The stream of reports to the monitor: steady ones, and phase changes at once."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

import grpc

from tailrace.service.channels import Channels
from tailrace.service.said import said
from tailrace.v1 import monitor_pb2, monitor_pb2_grpc
from worker_agent.carried import CarriedRequests
from worker_agent.engine.base import EngineStats
from worker_agent.load import MigrationLoad, load_of, request_report
from worker_agent.phase_news import PhaseNews
from worker_agent.speeds import Speeds

log = logging.getLogger(__name__)

_BACKOFF_S: Final = (0.1, 0.2, 0.5, 1.0)
# Phase changes that come within this time are told together.
_GATHER_S: Final = 0.005
# A monitor that takes no report for so long is given up; the stream is opened anew.
_WRITE_S: Final = 5.0


class _Closed(Exception):
    """The monitor ended the stream."""


# How a stream ends, whoever ends it.
_ENDED: Final = (grpc.aio.AioRpcError, _Closed, TimeoutError, asyncio.InvalidStateError)


class Reports:
    """Reports for as long as `run` runs; connects again for ever. Nothing on the data path waits for it."""

    def __init__(
        self,
        instance_id: str,
        incarnation: str,
        block_tokens: int,
        stats: Callable[[], EngineStats],
        migrations: Callable[[], MigrationLoad],
        carried: CarriedRequests,
        news: PhaseNews,
        speeds: Callable[[], Speeds | None],
        monitor: Callable[[], str | None],
        channels: Channels,
        interval_s: float,
    ) -> None:
        """`monitor`: address of the monitor, while there is one."""
        self._instance_id = instance_id
        self._incarnation = incarnation
        self._block_tokens = block_tokens
        self._stats = stats
        self._migrations = migrations
        self._carried = carried
        self._news = news
        self._speeds = speeds
        self._monitor = monitor
        self._channels = channels
        self._interval_s = interval_s
        self._seq = 0

    async def run(self) -> None:
        """Until cancelled."""
        failures = 0
        while True:
            address = self._monitor()
            if address is not None:
                began_s = time.monotonic()
                reason = await self._attempt(address)
                log.info("reports to the monitor at %s stopped: %s", address, reason)
                failures = 0 if time.monotonic() - began_s > 5 else failures + 1
            await asyncio.sleep(_BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)])

    async def _attempt(self, address: str) -> str:
        """One stream, to its end; why it ended."""
        call = monitor_pb2_grpc.MonitorStub(self._channels.get(address)).Report()
        tasks = [
            asyncio.create_task(_acknowledged(call), name="report acknowledgements"),
            asyncio.create_task(self._write(call, address), name="reports"),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            call.cancel()
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception) and not isinstance(result, _ENDED):
                raise result
        return "; ".join(said(result) for result in results if isinstance(result, Exception))

    async def _write(
        self,
        call: grpc.aio.StreamStreamCall[monitor_pb2.WorkerReport, monitor_pb2.ReportAck],
        address: str,
    ) -> None:
        due_s = time.monotonic()
        while True:
            steady = time.monotonic() >= due_s
            async with asyncio.timeout(_WRITE_S):
                await call.write(self._report(steady))
            if steady:
                due_s = max(due_s + self._interval_s, time.monotonic())
                if self._monitor() not in (None, address):
                    raise _Closed("another monitor leads")
            await self._next(due_s)

    async def _next(self, due_s: float) -> None:
        """Until there is something to tell or the next steady report is due."""
        try:
            async with asyncio.timeout(max(0.0, due_s - time.monotonic())):
                await self._news.wakeup.wait()
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
        stats = self._stats() if steady or self._news.needs_stats else None
        report.phase_events.extend(
            self._news.take(stats.requests if stats is not None else [], self._carried)
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
) -> None:
    """Read acknowledgements; they only show that the monitor lives."""
    while isinstance(await call.read(), monitor_pb2.ReportAck):
        pass
    raise _Closed("closed by the monitor")
