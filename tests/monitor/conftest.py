"""A monitor for one test, served over gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import add_TraceServiceServicer_to_server

from monitor_svc.reports import LatestReports
from monitor_svc.servicer import MONITOR_SERVICE, Feed, MonitorServicer, add_to_server
from monitor_svc.traces import OTLP_SERVICE, OtlpServicer, TraceStore
from tailrace.service.server import Servicer, serve_grpc
from tailrace.v1.monitor_pb2_grpc import MonitorStub

if TYPE_CHECKING:
    from tailrace.v1.monitor_pb2_grpc import MonitorAsyncStub


@dataclass
class Monitor:
    """The parts of a monitor that tests use."""

    address: str
    reports: LatestReports
    feed: Feed
    stub: MonitorAsyncStub


@pytest.fixture
async def monitor() -> AsyncIterator[Monitor]:
    """Start a monitor whose subscriber queues hold four reports of events."""
    reports, traces = LatestReports(silence_timeout_s=2.0), TraceStore()
    feed = Feed(reports, events_max=4)
    servicers = [
        Servicer(add_to_server, MonitorServicer(reports, feed, traces), MONITOR_SERVICE),
        Servicer(add_TraceServiceServicer_to_server, OtlpServicer(traces), OTLP_SERVICE),
    ]
    async with (
        serve_grpc("127.0.0.1:0", servicers) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        yield Monitor(server.address, reports, feed, MonitorStub(channel))
