"""`tailrace serve monitor`: collects what workers report, publishes it, and keeps the last traces."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Final

import click
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import add_TraceServiceServicer_to_server

from monitor_svc.gauges import MonitorGauges
from monitor_svc.reports import LatestReports
from monitor_svc.servicer import MONITOR_SERVICE, Feed, MonitorServicer, add_to_server, watch_silence
from monitor_svc.traces import OTLP_SERVICE, OtlpServicer, TraceStore
from tailrace.numeric import Duration, WholeRange
from tailrace.service.options import CommonOptions, common_options
from tailrace.service.runtime import Shutdown, open_service, run_service
from tailrace.service.server import Servicer, serve_grpc
from tailrace.service.tasks import supervised

log = logging.getLogger(__name__)

KIND: Final = "monitor"
# Resigning leadership takes two calls to etcd.
_DRAIN_S: Final = 10.0


@click.command("monitor")
@common_options(KIND)
@click.option(
    "--patience",
    type=Duration(min=0.1),
    default=2.0,
    show_default=True,
    help="Seconds without a report after which an instance counts as silent.",
)
@click.option(
    "--trace-spans",
    type=WholeRange(min=1),
    default=50_000,
    show_default=True,
    help="Capacity of the built-in trace store, in spans.",
)
def command(common: CommonOptions, patience: float, trace_spans: int) -> None:
    """Collect worker reports and publish the cluster's state; run a second monitor as a standby."""
    run_service(lambda shutdown: serve(common, patience, trace_spans, shutdown))


async def serve(
    common: CommonOptions, silence_timeout_s: float, trace_spans: int, shutdown: Shutdown
) -> None:
    """Run the monitor until cancelled. Raise StoreUnavailable, ListenError or OSError."""
    async with open_service(KIND, common) as service:
        members = service.members
        reports = LatestReports(silence_timeout_s)
        feed = Feed(reports)
        traces = TraceStore(trace_spans)
        servicer = MonitorServicer(reports, feed, traces)
        service.registry.register(MonitorGauges(reports, feed, servicer, traces, lambda: members.slo))
        servicers = [
            Servicer(add_to_server, servicer, MONITOR_SERVICE),
            Servicer(add_TraceServiceServicer_to_server, OtlpServicer(traces), OTLP_SERVICE),
        ]
        async with (
            serve_grpc(common.listen, servicers, common.transport) as server,
            await service.stand(server.address) as membership,
        ):

            async def drain() -> None:
                # Workers and schedulers switch to another monitor while this one still answers.
                await server.set_serving(False)
                await membership.aclose()

            with shutdown.draining(drain, _DRAIN_S):
                silence = partial(watch_silence, reports, feed, members, silence_timeout_s)
                async with supervised({"silence": silence}):
                    await asyncio.get_running_loop().create_future()
