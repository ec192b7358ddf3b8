"""The built-in trace store."""

from __future__ import annotations

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import TraceServiceStub
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, Span, TracesData

from monitor_svc.traces import AmbiguousTraceError, TraceStore
from tailrace.v1.admin_pb2 import GetTraceRequest
from tests.monitor.conftest import Monitor


def spans(trace: int, count: int = 1, request_id: str = "") -> ResourceSpans:
    """Return spans of one trace from one process."""
    resource = ResourceSpans()
    scope = resource.scope_spans.add()
    for number in range(count):
        span = scope.spans.add(
            trace_id=trace.to_bytes(16, "big"), span_id=number.to_bytes(8, "big"), name=f"s{number}"
        )
        if request_id:
            span.attributes.add(key="tailrace.request_id").value.string_value = request_id
    return resource


def names(found: TracesData | None) -> list[str]:
    """Return the names of the spans."""
    assert found is not None
    return [s.name for r in found.resource_spans for scope in r.scope_spans for s in scope.spans]


def test_traces_are_found_by_trace_id_and_part_of_a_request_id() -> None:
    store = TraceStore()
    store.add(spans(1, 2, "chatcmpl-abc"))
    store.add(spans(2, 1, "chatcmpl-abd"))
    store.add(spans(1, 1))
    assert len(names(store.find(f"{1:032x}"))) == 3
    assert len(names(store.find("abc"))) == 3
    assert len(names(store.find("chatcmpl-abd"))) == 1
    assert store.find("nothing") is None
    with pytest.raises(AmbiguousTraceError, match="chatcmpl-abc, chatcmpl-abd"):
        store.find("chatcmpl-ab")


def test_two_requests_of_one_trace_are_not_ambiguous() -> None:
    store = TraceStore()
    store.add(spans(1, 1, "0_abc"))
    store.add(spans(1, 1, "1_abc"))
    assert len(names(store.find("abc"))) == 2


def test_spans_of_several_traces_in_one_message() -> None:
    store = TraceStore()
    message = spans(1)
    message.scope_spans[0].spans.append(Span(trace_id=(2).to_bytes(16, "big"), name="other"))
    store.add(message)
    assert names(store.find(f"{2:032x}")) == ["other"]


def test_the_store_is_bounded() -> None:
    store = TraceStore(spans_max=10, trace_spans_max=4)
    store.add(spans(1, 9, "first"))
    assert store.spans == 4
    assert store.dropped == 5
    for trace in range(2, 5):
        store.add(spans(trace, 4))
    assert store.spans <= 10
    assert store.find("first") is None
    assert store.traces == 2


async def test_spans_are_received_over_otlp(monitor: Monitor) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as untraced:
        await monitor.stub.GetTrace(GetTraceRequest(id="req-1"))
    assert "tracing is off unless" in (untraced.value.details() or "")
    async with grpc.aio.insecure_channel(monitor.address) as channel:
        export = TraceServiceStub(channel).Export
        await export(ExportTraceServiceRequest(resource_spans=[spans(1, 2, "req-1")]))
    reply = await monitor.stub.GetTrace(GetTraceRequest(id="req-1"))
    assert names(TracesData.FromString(reply.traces_data)) == ["s0", "s1"]
    for text, code in (("absent", grpc.StatusCode.NOT_FOUND), ("", grpc.StatusCode.INVALID_ARGUMENT)):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await monitor.stub.GetTrace(GetTraceRequest(id=text))
        assert caught.value.code() == code
        assert "tracing is off" not in (caught.value.details() or "")
