"""Spans are exported over OTLP gRPC if an endpoint is configured."""

import queue
import random
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import add_TraceServiceServicer_to_server
from opentelemetry.proto.trace.v1.trace_pb2 import Status
from opentelemetry.trace import get_current_span

from tailrace.telemetry import attributes
from tailrace.telemetry.tracing import (
    configure,
    context_from_traceparent,
    record_span,
    start_span,
    traceparent_of,
)
from tests.waiting import WAIT_S

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class _Collector:
    """An OTLP trace service."""

    def __init__(self) -> None:
        self.received: queue.Queue[ExportTraceServiceRequest] = queue.Queue()

    def Export(
        self, request: ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> ExportTraceServiceResponse:
        self.received.put(request)
        return ExportTraceServiceResponse()


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Collector]:
    collector = _Collector()
    server = grpc.server(ThreadPoolExecutor(1))
    add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    # All spans are sent together, at the end, however long that takes.
    monkeypatch.setattr("tailrace.telemetry.tracing._SCHEDULE_MS", int(1_000 * WAIT_S))
    monkeypatch.setattr("tailrace.telemetry.tracing._EXPORT_TIMEOUT_S", int(WAIT_S))
    yield collector
    server.stop(None).wait()


async def test_spans_arrive_with_their_times_and_parents(collector: _Collector) -> None:
    tracing = configure("worker", "w-1")
    tracer = tracing.tracer("engine")
    assert tracing.enabled
    assert tracing.continues(PARENT) and not tracing.continues("")
    root = start_span(tracer, "request", PARENT, start_ns=1_000, attributes={attributes.REQUEST_ID: "r"})
    under = traceparent_of(root)
    assert under.startswith("00-0af7651916cd43dd8448eb211c80319c-") and under.endswith("-01")
    record_span(tracer, "prefill", under, 2_000, 3_000, error="out of blocks")
    root.end(9_000)
    await tracing.shutdown()
    resource = collector.received.get(timeout=WAIT_S).resource_spans[0]
    about = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
    assert (about["service.name"], about["service.instance.id"]) == ("tailrace-worker", "w-1")
    prefill, request = resource.scope_spans[0].spans
    assert (prefill.start_time_unix_nano, prefill.end_time_unix_nano) == (2_000, 3_000)
    assert prefill.status.code == Status.STATUS_CODE_ERROR
    assert prefill.parent_span_id == request.span_id
    assert request.parent_span_id.hex() == "b7ad6b7169203331"
    assert request.attributes[0].key == "tailrace.request_id"


async def test_without_an_endpoint_tracing_is_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    tracing = configure("worker", "w-1")
    span = start_span(tracing.tracer("engine"), "request", PARENT)
    assert not tracing.enabled
    assert not tracing.continues(PARENT)
    assert not span.is_recording()
    assert traceparent_of(span) == ""
    await tracing.shutdown()


def test_without_an_endpoint_the_sdk_is_not_imported() -> None:
    code = (
        "import os, sys; os.environ.pop('OTEL_EXPORTER_OTLP_ENDPOINT', None)\n"
        "from tailrace.telemetry.tracing import configure; configure('worker', 'w')\n"
        "sys.exit('opentelemetry.sdk.trace' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


async def test_an_unreachable_collector_does_not_delay_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    tracing = configure("worker", "w-1")
    start_span(tracing.tracer("engine"), "request", "").end()
    await tracing.shutdown()


async def test_children_of_an_unsampled_parent_are_not_recorded(collector: _Collector) -> None:
    async with configure("worker", "w-1") as tracing:
        span = start_span(tracing.tracer("engine"), "request", PARENT[:-2] + "00")
        assert traceparent_of(span) == ""
        span.end()
    assert collector.received.empty()


@pytest.mark.parametrize("text", ["", "nonsense", "00-0-0-0"])
def test_a_malformed_traceparent_starts_a_new_trace(text: str) -> None:
    assert not get_current_span(context_from_traceparent(text)).get_span_context().is_valid


async def test_span_ids_differ_between_equally_seeded_processes(collector: _Collector) -> None:
    """vLLM seeds Python's generator with the same number in every worker."""
    tracing = configure("worker", "w-1")
    parents = []
    for _ in range(2):
        random.seed(0)
        span = start_span(tracing.tracer("engine"), "round", PARENT)
        parents.append(traceparent_of(span))
        span.end()
    await tracing.shutdown()
    assert parents[0] != parents[1]
