"""Stream reports to the monitor: steady ones at an interval, and phase changes at once."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import grpc

from tailrace.cache.book import CacheBook
from tailrace.messages import PHASE_NUMBERS
from tailrace.request_columns import columns_from
from tailrace.security.roles import Role
from tailrace.service.channels import Channels, format_error
from tailrace.service.reachability import Reachability
from tailrace.telemetry.incidents import guarded
from tailrace.v1 import monitor_pb2, monitor_pb2_grpc, types_pb2
from worker_agent.cache_servicer import update_of
from worker_agent.engine.base import EngineStats, RequestStats
from worker_agent.load import STATES, MigrationLoad, load_of, request_report
from worker_agent.running_requests import RunningRequest, RunningRequests
from worker_agent.speeds import Speeds

_POLL_S: Final = 0.25


class Unacknowledged:
    """The sequence number and sending time of each report, in seconds of the monotonic clock."""

    def __init__(self) -> None:
        self._written: deque[tuple[int, float]] = deque()

    def sent(self, seq: int) -> None:
        """Add a report that is being sent; sequence numbers increase."""
        self._written.append((seq, time.monotonic()))

    def acknowledged(self, seq: int) -> None:
        """Remove this report and all before it."""
        while self._written and self._written[0][0] <= seq:
            self._written.popleft()

    def waiting_s(self, now_s: float) -> float:
        """Return the age of the oldest report in seconds; 0 if there is none."""
        return now_s - self._written[0][1] if self._written else 0.0

    async def overdue(self, limit_s: Callable[[], float]) -> None:
        """Wait until a report is older than the limit.

        Time for which this process itself was suspended does not count: the acknowledgement may be waiting in
        its socket.
        """
        checked_s = time.monotonic()
        while True:
            await asyncio.sleep(_POLL_S)
            now_s = time.monotonic()
            suspended_s = now_s - checked_s - _POLL_S
            checked_s = now_s
            if suspended_s > _POLL_S:
                self._written = deque((seq, at_s + suspended_s) for seq, at_s in self._written)
            elif self.waiting_s(now_s) > limit_s():
                return


log = logging.getLogger(__name__)

_LOOP: Final = "reports"

_BACKOFF_S: Final = (0.1, 0.2, 0.5, 1.0)
# Phase changes within this time are sent together.
_GATHER_S: Final = 0.005
# A monitor that accepts or acknowledges no report for this long is given up; the stream is opened again.
_WRITE_S: Final = 5.0
# The same if there is another monitor. By default monitors declare an instance silent after two seconds.
_ACKNOWLEDGE_S: Final = 1.25
# A stream that has lasted so long shows that its monitor is reachable.
_STABLE_S: Final = 5.0


class _Closed(Exception):
    """The monitor ended the stream."""


class _MonitorChanged(Exception):
    """Another monitor is preferred now."""


# Exceptions that end a stream, from either side.
_ENDED: Final = (grpc.aio.AioRpcError, _Closed, _MonitorChanged, TimeoutError, asyncio.InvalidStateError)


class ReportStream:
    """Report while `run` runs, reconnecting forever. Nothing on the data path waits for it.

    One monitor gets the reports: the leader, or the next that can be reached. Schedulers watch all monitors,
    so a worker that is cut off from one monitor stays active.
    """

    def __init__(
        self,
        instance_id: str,
        incarnation: str,
        block_tokens: int,
        stats: Callable[[], EngineStats],
        request_stats: Callable[[Iterable[str]], Sequence[RequestStats]],
        migrations: Callable[[], MigrationLoad],
        running: RunningRequests,
        events: PhaseEvents,
        speeds: Callable[[], Speeds | None],
        monitors: Callable[[], Sequence[str]],
        channels: Channels,
        interval_s: float,
        cache: CacheBook | None = None,
    ) -> None:
        """`monitors()` returns the monitors' addresses in order of preference. `cache`: the engine's prefix
        cache."""
        self._instance_id = instance_id
        self._incarnation = incarnation
        self._block_tokens = block_tokens
        self._stats = stats
        self._request_stats = request_stats
        self._migrations = migrations
        self._running = running
        self._events = events
        self._speeds = speeds
        self._monitors = monitors
        self._channels = channels
        self._reachability = Reachability(channels, Role.MONITOR)
        self._interval_s = interval_s
        self._seq = 0
        self._cache = cache

    async def run(self) -> None:
        """Run until cancelled."""
        failures = 0
        try:
            while True:
                address = self._preferred_monitor()
                if address is not None:
                    began_s = time.monotonic()
                    failed, reason = await self._attempt(address)
                    log.info("reports to the monitor at %s stopped: %s", address, reason)
                    stable = time.monotonic() - began_s > _STABLE_S
                    if stable:
                        self._reachability.succeeded(address)
                    if failed:
                        self._reachability.failed(address)
                    failures = failures + 1 if failed and not stable else 0
                # Switch to another monitor without delay, before this one declares the instance silent.
                if self._preferred_monitor() in (None, address):
                    await asyncio.sleep(_BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)])
        finally:
            await self._reachability.close()

    def _preferred_monitor(self) -> str | None:
        """Return the first monitor that can be reached; if none can, the first."""
        addresses = self._monitors()
        self._reachability.keep_only(addresses)
        return next(filter(self._reachability.usable, addresses), addresses[0] if addresses else None)

    def _ack_timeout_s(self, address: str) -> float:
        """Return how long to wait for an acknowledgement.

        With another monitor available it is shorter than the time after which this one declares the instance
        silent.
        """
        others = (other for other in self._monitors() if other != address)
        return _ACKNOWLEDGE_S if any(map(self._reachability.usable, others)) else _WRITE_S

    async def _attempt(self, address: str) -> tuple[bool, str]:
        """Run one stream to its end; return whether the monitor failed, and why the stream ended."""
        call = monitor_pb2_grpc.MonitorStub(self._channels.get(address, Role.MONITOR)).Report()
        unacknowledged = Unacknowledged()
        reading = asyncio.create_task(
            self._read_acknowledgements(call, unacknowledged), name="report acknowledgements"
        )
        writing = asyncio.create_task(self._write(call, address, unacknowledged), name="reports")
        waiting = asyncio.create_task(
            unacknowledged.overdue(lambda: self._ack_timeout_s(address)), name="report deadlines"
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
        if any(isinstance(result, _MonitorChanged) for result in results):
            return False, "another monitor is preferred"
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
            unacknowledged.sent(report.seq)
            async with asyncio.timeout(_WRITE_S):
                await call.write(report)
            if steady:
                due_s = max(due_s + self._interval_s, time.monotonic())
                if self._preferred_monitor() not in (None, address):
                    raise _MonitorChanged
            await self._next(due_s)

    async def _next(self, due_s: float) -> None:
        """Wait until there are events to send or the next steady report is due."""
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
        # Each part by itself: one figure that cannot be reported must not hide the others.
        if self._cache is not None:
            with guarded(_LOOP, "prefix cache"):
                report.cache.CopyFrom(update_of(self._cache))
        stats: EngineStats | None = None
        changed: Sequence[RequestStats] = ()
        if steady:
            with guarded(_LOOP, "engine statistics"):
                stats = self._stats()
        # After the rows, as they are applied: vLLM's thread goes on meanwhile.
        with guarded(_LOOP, "changed requests"):
            changed = self._request_stats(self._events.changed_ids)
        with guarded(_LOOP, "phase events"):
            report.phase_events.extend(self._events.take(changed, self._running))
        if stats is not None:
            with guarded(_LOOP, "load"):
                load = load_of(stats, self._block_tokens, self._migrations(), self._speeds())
                report.load.CopyFrom(load)
            with guarded(_LOOP, "requests"):
                self._add_requests(report, stats)
        return report

    def _add_requests(self, report: monitor_pb2.WorkerReport, stats: EngineStats) -> None:
        now_s = time.monotonic()
        rows: list[monitor_pb2.RequestReport] = []
        for request in stats.requests:
            with guarded(_LOOP, request.request_id):
                rows.append(request_report(request, self._running.by_id(request.request_id), now_s))
        report.requests.CopyFrom(columns_from(rows))

    async def _read_acknowledgements(
        self,
        call: grpc.aio.StreamStreamCall[monitor_pb2.WorkerReport, monitor_pb2.ReportAck],
        unacknowledged: Unacknowledged,
    ) -> None:
        """Read acknowledgements, which show that the monitor is alive and receives the reports."""
        while isinstance(ack := await call.read(), monitor_pb2.ReportAck):
            unacknowledged.acknowledged(ack.seq)
        raise _Closed("closed by the monitor")


# Events beyond this are dropped, oldest first: the next steady report contains all that matters.
_PENDING_MAX: Final = 10_000


@dataclass(frozen=True, slots=True)
class _Gone:
    """A request that has left. Encoded with the report: whatever is wrong with it then ends no step."""

    request_id: str
    frontend_id: str
    epoch: int
    output_tokens: int
    time_s: float
    answered: monitor_pb2.Answered | None
    moved_to: str


class PhaseEvents:
    """Collect events between two reports.

    The data path only records which requests changed; which phase they entered is read from the engine when
    the events are sent.
    """

    def __init__(self) -> None:
        self._changed: dict[str, None] = {}
        self._gone: deque[_Gone] = deque(maxlen=_PENDING_MAX)
        self.wakeup = asyncio.Event()

    @property
    def changed_ids(self) -> Sequence[str]:
        """Return the requests that entered a phase, or came to this instance."""
        return [*self._changed]

    def changed(self, request_id: str) -> None:
        """Record that a request entered a phase, or came to this instance."""
        if len(self._changed) < _PENDING_MAX:
            self._changed[request_id] = None
        self.wakeup.set()

    def gone(
        self,
        request: RunningRequest,
        output_tokens: int = 0,
        answered: monitor_pb2.Answered | None = None,
        moved_to: str = "",
    ) -> None:
        """Record that a request has left this instance: finished, aborted or moved. `output_tokens`: if
        known; `answered`, `moved_to`: as in PhaseEvent."""
        self._changed.pop(request.request_id, None)
        left = (request.request_id, request.frontend_id, request.epoch, output_tokens, time.time())
        self._gone.append(_Gone(*left, answered, moved_to))
        self.wakeup.set()

    def take(self, changed: Sequence[RequestStats], running: RunningRequests) -> list[monitor_pb2.PhaseEvent]:
        """Return and remove all events. `changed`: those of `changed_ids` that are here."""
        self.wakeup.clear()
        self._changed.clear()
        gone, self._gone = self._gone, deque(maxlen=_PENDING_MAX)
        events = [
            monitor_pb2.PhaseEvent(
                request_id=left.request_id,
                frontend_id=left.frontend_id,
                epoch=left.epoch,
                phase=types_pb2.PHASE_UNSPECIFIED,
                output_tokens=left.output_tokens,
                time_s=left.time_s,
                answered=left.answered,
                moved_to_instance_id=left.moved_to,
            )
            for left in gone
        ]
        if changed:
            now_s = time.time()
            events += [
                monitor_pb2.PhaseEvent(
                    request_id=request.request_id,
                    frontend_id=request.frontend_id,
                    epoch=request.epoch,
                    phase=PHASE_NUMBERS[request.phase],
                    prompt_tokens=request.prompt_tokens,
                    output_tokens=request.output_tokens,
                    time_s=now_s,
                    max_tokens=request.max_tokens,
                    phase_tokens=request.phase_tokens,
                    state=STATES[request.state],
                    traceparent=_traceparent(running.by_id(request.request_id)),
                    predicted_remaining_tokens=request.predicted_remaining_tokens,
                )
                for request in changed
            ]
        return events


def _traceparent(running: RunningRequest | None) -> str:
    return "" if running is None else running.traceparent
