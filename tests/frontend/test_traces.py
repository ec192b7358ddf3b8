"""Spans of a request, recorded by an in-memory exporter."""

from __future__ import annotations

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from frontend_svc.observer import FrontendMetrics, RequestTraces, StreamObserver
from frontend_svc.placement import Chosen
from frontend_svc.streams import ANSWER_BEGUN, FINISHED, PREFILL_DONE, REASONING_ENDED, StreamTable
from tests.frontend.test_streams import single_entry_step

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_recovered_request_is_one_trace() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    table, registry = StreamTable(), CollectorRegistry()
    metrics = FrontendMetrics(registry, table, list)
    observer = StreamObserver(metrics, RequestTraces(provider.get_tracer("test"), "f0"))
    stream = table.open("r", prompt_tokens=3)
    observer.arrived(stream, TRACEPARENT)
    assert stream.traceparent.split("-")[1] == TRACEPARENT.split("-")[1]
    assert stream.traceparent != TRACEPARENT
    table.assign(stream, "a")
    observer.placed(stream, Chosen("a", "test"), 0.01)
    observer.accepted(table.accept("a", single_entry_step(stream, 0, 0, [1], PREFILL_DONE)))
    observer.lost(table.orphan_all("a"), "a", "silent")
    table.assign(stream, "b")
    observer.placed(stream, Chosen("b", "test"), 0.01)
    observer.accepted(table.accept("b", single_entry_step(stream, 1, 1, [2], REASONING_ENDED)))
    observer.accepted(table.accept("b", single_entry_step(stream, 1, 2, [3], ANSWER_BEGUN | FINISHED)))
    spans = exporter.get_finished_spans()
    names = [span.name for span in spans]
    assert names == [
        "placement", "prefill", "reasoning", "placement", "recovery", "reasoning", "answering", "request",
    ]  # fmt: skip
    root = spans[-1]
    assert root.parent is not None and f"{root.parent.span_id:016x}" == TRACEPARENT.split("-")[2]
    assert len({span.context.trace_id for span in spans}) == 1
    assert root.attributes is not None
    assert (root.attributes["tailrace.output_tokens"], root.attributes["tailrace.epoch"]) == (3, 1)
    recovery = spans[4]
    assert all(span.parent.span_id == root.context.span_id for span in spans[:3] if span.parent is not None)
    assert spans[3].parent is not None and spans[3].parent.span_id == recovery.context.span_id
    assert registry.get_sample_value("tailrace_frontend_ttft_seconds_count") == 1
    assert registry.get_sample_value("tailrace_frontend_ttfat_seconds_count") == 1
    assert registry.get_sample_value("tailrace_frontend_tpot_seconds_count") == 1


def test_refused_request_ends_its_trace() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    table, registry = StreamTable(), CollectorRegistry()
    traces = RequestTraces(provider.get_tracer("test"), "f0")
    observer = StreamObserver(FrontendMetrics(registry, table, list), traces)
    stream = table.open("r", prompt_tokens=3)
    observer.arrived(stream, TRACEPARENT)
    observer.stream_refused(stream, 429)
    assert [span.name for span in exporter.get_finished_spans()] == ["request"]
    assert registry.get_sample_value("tailrace_frontend_requests_total", {"outcome": "refused"}) == 1
    assert registry.get_sample_value("tailrace_frontend_refused_requests_total", {"status": "429"}) == 1
