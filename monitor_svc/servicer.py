"""The gRPC Monitor service."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import grpc

from monitor_svc.feed import Feed
from monitor_svc.reports import Reports
from monitor_svc.traces import AmbiguousTraceError, TraceStore
from tailrace.v1 import admin_pb2, monitor_pb2, monitor_pb2_grpc


class MonitorServicer(monitor_pb2_grpc.MonitorServicer):
    """Receive reports and pass them on."""

    def __init__(self, reports: Reports, feed: Feed, traces: TraceStore) -> None:
        # Counted since the start, for metrics.
        self.reports_received = 0
        self.phase_events: dict[int, int] = {}
        self._reports = reports
        self._feed = feed
        self._traces = traces

    async def Report(
        self,
        request_iterator: AsyncIterator[monitor_pb2.WorkerReport],
        context: grpc.aio.ServicerContext[monitor_pb2.WorkerReport, monitor_pb2.ReportAck],
    ) -> AsyncIterator[monitor_pb2.ReportAck]:
        """Acknowledge each report, in order."""
        async for report in request_iterator:
            if not report.instance_id or not report.incarnation:
                await context.abort(
                    grpc.StatusCode.INVALID_ARGUMENT, "instance_id, incarnation: must not be empty"
                )
            self._reports.apply(report, time.monotonic())
            self.reports_received += 1
            for event in report.phase_events:
                self.phase_events[event.phase] = self.phase_events.get(event.phase, 0) + 1
            self._feed.publish(report)
            yield monitor_pb2.ReportAck(seq=report.seq)

    async def Watch(
        self,
        request: monitor_pb2.WatchRequest,
        context: grpc.aio.ServicerContext[monitor_pb2.WatchRequest, monitor_pb2.StateDelta],
    ) -> AsyncIterator[monitor_pb2.StateDelta]:
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
            found = self._traces.find(request.id)
        except AmbiguousTraceError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"id: {error}")
        if found is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"id: no spans of {request.id!r} are held")
        return admin_pb2.GetTraceReply(traces_data=found.SerializeToString())
