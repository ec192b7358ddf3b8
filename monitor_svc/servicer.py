"""The gRPC Monitor service: workers report to it (`Report`), and schedulers watch what is reported
(`Watch`)."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Final

import grpc
from google.protobuf.message import DecodeError

from monitor_svc.reports import LatestReports, ReceivedReport
from monitor_svc.traces import AmbiguousTraceError, TraceStore
from tailrace.security.handlers import Handler
from tailrace.service.tasks import cancel
from tailrace.store.membership import Membership
from tailrace.telemetry.incidents import unreadable
from tailrace.v1 import admin_pb2, monitor_pb2, types_pb2

# Between two acknowledgements, in seconds. Workers give a monitor up when one is missing for 1.25 s. For both
# sides one costs as much as a report.
_INTERVAL_S: Final = 0.75


class Acknowledgements:
    """Yield the sequence number of the latest report, at once if none was yielded for an interval."""

    def __init__(self) -> None:
        self._latest: int | None = None
        self._yielded: int | None = None
        self._ended = False
        self._changed = asyncio.Event()
        # While it runs, a report waits for its acknowledgement.
        self._interval: asyncio.TimerHandle | None = None

    def received(self, seq: int) -> None:
        """Have a report acknowledged."""
        self._latest = seq
        if self._interval is None:
            self._changed.set()

    def end(self) -> None:
        """End the iteration after what is left: no more reports will be received."""
        self._ended = True
        if self._interval is not None:
            self._interval.cancel()
        self._changed.set()

    def _interval_ended(self) -> None:
        self._interval = None
        if self._latest != self._yielded:
            self._changed.set()

    async def __aiter__(self) -> AsyncIterator[int]:
        """Iterate until `end`."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            ended, latest = self._ended, self._latest
            if latest is not None and latest != self._yielded:
                self._yielded = latest
                if not ended:
                    loop = asyncio.get_running_loop()
                    self._interval = loop.call_later(_INTERVAL_S, self._interval_ended)
                yield latest
            if ended:
                return


MONITOR_SERVICE: Final = "tailrace.v1.Monitor"


class InvalidReportError(Exception):
    """A report cannot be decoded, or does not say which instance it is from."""


_TRACING_OFF: Final = (
    ", nor any others: tracing is off unless OTEL_EXPORTER_OTLP_ENDPOINT of the services names the monitor"
)


class MonitorServicer:
    """Receive reports and pass them on."""

    def __init__(self, reports: LatestReports, feed: Feed, traces: TraceStore) -> None:
        # Counted since the start, for metrics.
        self.reports_received = 0
        self.phase_events: dict[int, int] = dict.fromkeys(types_pb2.Phase.values(), 0)
        self._reports = reports
        self._feed = feed
        self._traces = traces

    async def Report(
        self,
        request_iterator: AsyncIterator[bytes],
        context: grpc.aio.ServicerContext[bytes, monitor_pb2.ReportAck],
    ) -> AsyncIterator[monitor_pb2.ReportAck]:
        """Receive encoded reports; one acknowledgement stands for all reports before."""
        acknowledgements = Acknowledgements()
        reading = asyncio.create_task(self._read(request_iterator, acknowledgements), name="worker reports")
        try:
            async for seq in acknowledgements:
                yield monitor_pb2.ReportAck(seq=seq)
            await reading
        except InvalidReportError as error:
            unreadable("report of a worker", f"from {context.peer()}", error)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            await cancel(reading)
            # It keeps an error, whose frames have it.
            del reading

    async def _read(self, reports: AsyncIterator[bytes], acknowledgements: Acknowledgements) -> None:
        try:
            async for encoded in reports:
                try:
                    received = ReceivedReport.decode(encoded)
                except DecodeError as error:
                    raise InvalidReportError(f"the request cannot be decoded: {error}") from error
                report = received.message
                if not report.instance_id or not report.incarnation:
                    raise InvalidReportError("instance_id, incarnation: must not be empty")
                try:
                    self._apply(received)
                except Exception as error:
                    raise InvalidReportError(f"the report cannot be processed: {error}") from error
                acknowledgements.received(report.seq)
        finally:
            acknowledgements.end()

    def _apply(self, received: ReceivedReport) -> None:
        self._reports.apply(received, time.monotonic())
        self.reports_received += 1
        for event in received.message.phase_events:
            # Not those of a later version, of which there may be any number.
            if event.phase in self.phase_events:
                self.phase_events[event.phase] += 1
        self._feed.publish(received)

    async def Watch(
        self,
        request: monitor_pb2.WatchRequest,
        context: grpc.aio.ServicerContext[monitor_pb2.WatchRequest, monitor_pb2.EncodedDelta],
    ) -> AsyncIterator[monitor_pb2.EncodedDelta]:
        """Stream deltas until the subscriber disconnects; gRPC's flow control pauses the loop while it is
        slow."""
        with self._feed.subscribe() as subscription:
            while True:
                yield await subscription.next()

    async def GetTrace(
        self,
        request: admin_pb2.GetTraceRequest,
        context: grpc.aio.ServicerContext[admin_pb2.GetTraceRequest, admin_pb2.GetTraceReply],
    ) -> admin_pb2.GetTraceReply:
        """Return a trace; NOT_FOUND without any span of it, INVALID_ARGUMENT if the id matches several."""
        if not request.id:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "id: must not be empty")
        try:
            trace = self._traces.find(request.id)
        except AmbiguousTraceError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"id: {error}")
        if trace is None:
            others = "" if self._traces.received else _TRACING_OFF
            await context.abort(grpc.StatusCode.NOT_FOUND, f"id: no spans of {request.id!r} are held{others}")
        return admin_pb2.GetTraceReply(traces_data=trace.SerializeToString())


def add_to_server(servicer: MonitorServicer, server: grpc.aio.Server) -> None:
    """Register the service: as generated, but reports and deltas keep what is only passed on encoded."""
    handlers: dict[str, Handler] = {
        "Report": grpc.stream_stream_rpc_method_handler(
            servicer.Report,
            # Decoding here costs less than the interceptor for requests that cannot be decoded.
            request_deserializer=None,
            response_serializer=monitor_pb2.ReportAck.SerializeToString,
        ),
        "Watch": grpc.unary_stream_rpc_method_handler(
            servicer.Watch,
            request_deserializer=monitor_pb2.WatchRequest.FromString,
            response_serializer=monitor_pb2.EncodedDelta.SerializeToString,
        ),
        "GetTrace": grpc.unary_unary_rpc_method_handler(
            servicer.GetTrace,
            request_deserializer=admin_pb2.GetTraceRequest.FromString,
            response_serializer=admin_pb2.GetTraceReply.SerializeToString,
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(MONITOR_SERVICE, handlers),))


log = logging.getLogger(__name__)


# Reports without a state, which nothing replaces.
_EVENTS_MAX: Final = 8_192
# Instances in a delta.
_BATCH_MAX: Final = 128
# Seconds between two deltas: reports of many instances wake a subscriber once. A delta costs the scheduler as
# much as ten reports.
_GATHER_S: Final = 0.01


class Subscription:
    """One subscriber's queue, of instances with something new: a subscriber that lags gets from each in turn
    its latest state and all phase events.

    When it overflows with events, it is replaced by a snapshot.
    """

    def __init__(self, reports: LatestReports, events_max: int) -> None:
        self.resnapshots = -1
        self._reports = reports
        self._events_max = events_max
        # New reports of each instance, in order; at most one of them is steady. Waiting longest first.
        self._queue: dict[str, list[ReceivedReport]] = {}
        # How many of them are not steady.
        self._events = 0
        self._lost_reports = True
        self._sent_s = -math.inf
        self._changed = asyncio.Event()
        self._changed.set()

    def offer(self, report: ReceivedReport | None) -> None:
        """Queue a report; None: only the set of silent instances has changed."""
        if report is not None and not self._lost_reports:
            new = self._queue.setdefault(report.message.instance_id, [])
            if report.steady:
                self._supersede(new)
            else:
                self._events += 1
            new.append(report)
            if self._events > self._events_max:
                self._queue.clear()
                self._events = 0
                self._lost_reports = True
        self._changed.set()

    def _supersede(self, new: list[ReceivedReport]) -> None:
        """Remove the state from the queued report of an instance that now has a later one."""
        index = next((index for index, report in enumerate(new) if report.steady), None)
        if index is not None:
            news = new[index].superseded()
            if news is None:
                del new[index]
            else:
                new[index] = news
                self._events += 1

    async def next(self) -> monitor_pb2.EncodedDelta:
        """Wait for changes; return the next delta."""
        await self._changed.wait()
        left_s = self._sent_s + _GATHER_S - time.monotonic()
        if left_s > 0 and len(self._queue) < _BATCH_MAX:
            await asyncio.sleep(left_s)
        self._sent_s = time.monotonic()
        if self._lost_reports:
            self._lost_reports = False
            self._changed.clear()
            self.resnapshots += 1
            return self._reports.snapshot()
        batch: list[bytes] = []
        for instance_id in list(itertools.islice(self._queue, _BATCH_MAX)):
            for report in self._queue.pop(instance_id):
                self._events -= not report.steady
                batch.append(report.encoded)
        if not self._queue:
            self._changed.clear()
        return monitor_pb2.EncodedDelta(reports=batch, silent_instance_ids=sorted(self._reports.silent))


class Feed:
    """All subscriptions."""

    def __init__(self, reports: LatestReports, events_max: int = _EVENTS_MAX) -> None:
        # Snapshots sent to past subscribers whose queue had overflowed.
        self._resnapshots = 0
        self._reports = reports
        self._events_max = events_max
        self._subscriptions: set[Subscription] = set()

    @property
    def subscribers(self) -> int:
        """Return the number of subscribers."""
        return len(self._subscriptions)

    @property
    def resnapshots(self) -> int:
        """Return how often a subscriber's queue overflowed."""
        return self._resnapshots + sum(max(0, s.resnapshots) for s in self._subscriptions)

    def publish(self, report: ReceivedReport | None) -> None:
        """Pass a report to every subscriber; None: only the set of silent instances has changed."""
        for subscription in self._subscriptions:
            subscription.offer(report)

    @contextmanager
    def subscribe(self) -> Iterator[Subscription]:
        """Subscribe for the duration of the block; the first delta is a snapshot."""
        subscription = Subscription(self._reports, self._events_max)
        self._subscriptions.add(subscription)
        try:
            yield subscription
        finally:
            self._subscriptions.discard(subscription)
            self._resnapshots += max(0, subscription.resnapshots)


_CHECKS_PER_TIMEOUT: Final = 8


async def watch_silence(
    reports: LatestReports, feed: Feed, members: Membership, silence_timeout_s: float
) -> None:
    """Check for silent instances several times per timeout, until cancelled."""
    interval_s = silence_timeout_s / _CHECKS_PER_TIMEOUT
    checked_s = time.monotonic()
    while True:
        await asyncio.sleep(interval_s)
        now_s = time.monotonic()
        suspended_s = now_s - checked_s - interval_s
        checked_s = now_s
        if suspended_s > silence_timeout_s / 2:
            log.warning("this process was suspended for %.1f s", suspended_s)
            reports.extend_deadlines(suspended_s)
        if reports.update_silent(now_s):
            log.info("silent now: %s", ", ".join(sorted(reports.silent)) or "nobody")
            feed.publish(None)
        reports.forget(reports.silent - members.instances.keys())
