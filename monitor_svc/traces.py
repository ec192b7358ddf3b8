"""The built-in trace store: recent traces in memory, bounded, received by the standard OTLP gRPC service."""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, Span, TracesData

from tailrace.request_ids import matching
from tailrace.telemetry.attributes import REQUEST_ID

OTLP_SERVICE: Final = "opentelemetry.proto.collector.trace.v1.TraceService"
_TRACE_ID: Final = re.compile(r"[0-9a-f]{32}")
_IDS_SHOWN: Final = 3


class AmbiguousTraceError(ValueError):
    """The text matches request ids of different traces."""


@dataclass(slots=True)
class _Trace:
    parts: list[ResourceSpans] = field(default_factory=list)
    spans: int = 0
    request_ids: set[str] = field(default_factory=set)


class TraceStore:
    """Hold spans by trace id, searchable by request id. The trace that grew least recently is evicted first.

    Holds at most `spans_max` spans, and of one trace at most `trace_spans_max`; the rest is dropped and
    counted.
    """

    def __init__(self, spans_max: int = 50_000, trace_spans_max: int = 2_000) -> None:
        self.dropped = 0
        self.received = 0
        self._spans_max = spans_max
        self._trace_spans_max = trace_spans_max
        self._traces: OrderedDict[bytes, _Trace] = OrderedDict()
        # A client may reuse a request id: the latest trace counts.
        self._by_request: dict[str, bytes] = {}
        self._spans = 0

    @property
    def spans(self) -> int:
        """Return the number of spans."""
        return self._spans

    @property
    def traces(self) -> int:
        """Return the number of traces."""
        return len(self._traces)

    def add(self, resource_spans: ResourceSpans) -> None:
        """Add the spans of one resource, which may belong to several traces."""
        for scope_spans in resource_spans.scope_spans:
            by_trace: dict[bytes, list[Span]] = {}
            for span in scope_spans.spans:
                by_trace.setdefault(span.trace_id, []).append(span)
            for trace_id, spans in by_trace.items():
                kept = self._reserve(trace_id, spans)
                if not kept:
                    continue
                part = ResourceSpans(resource=resource_spans.resource, schema_url=resource_spans.schema_url)
                scope = part.scope_spans.add(scope=scope_spans.scope, schema_url=scope_spans.schema_url)
                scope.spans.extend(kept)
                self._traces[trace_id].parts.append(part)
        while self._spans > self._spans_max:
            self._evict()

    def find(self, text: str) -> TracesData | None:
        """Return the trace with this id (32 hexadecimal digits), or of the request whose id contains the
        text, or that its client calls so.

        Return None if there is none. Raise AmbiguousTraceError.
        """
        trace_id = self._trace_id(text)
        trace = self._traces.get(trace_id) if trace_id is not None else None
        return None if trace is None else TracesData(resource_spans=trace.parts)

    def _trace_id(self, text: str) -> bytes | None:
        if _TRACE_ID.fullmatch(text.lower()) and bytes.fromhex(text) in self._traces:
            return bytes.fromhex(text)
        if (exact := self._by_request.get(text)) is not None:
            return exact
        named = matching(text, self._by_request)
        matches = [self._by_request[request_id] for request_id in named]
        if len(set(matches)) > 1:
            more = f" and {len(named) - _IDS_SHOWN} more" if len(named) > _IDS_SHOWN else ""
            raise AmbiguousTraceError(
                f"{text!r} is part of several request ids: {', '.join(named[:_IDS_SHOWN])}{more}"
            )
        return next(iter(matches), None)

    def _reserve(self, trace_id: bytes, spans: list[Span]) -> list[Span]:
        """Count the spans; return those within the trace's limit."""
        self.received += len(spans)
        trace = self._traces.setdefault(trace_id, _Trace())
        self._traces.move_to_end(trace_id)
        kept = spans[: max(0, self._trace_spans_max - trace.spans)]
        self.dropped += len(spans) - len(kept)
        trace.spans += len(kept)
        self._spans += len(kept)
        for span in kept:
            for attribute in span.attributes:
                if attribute.key == REQUEST_ID and attribute.value.string_value:
                    trace.request_ids.add(attribute.value.string_value)
                    self._by_request[attribute.value.string_value] = trace_id
        return kept

    def _evict(self) -> None:
        trace_id, trace = self._traces.popitem(last=False)
        self._spans -= trace.spans
        self.dropped += trace.spans
        for request_id in trace.request_ids:
            if self._by_request.get(request_id) == trace_id:
                del self._by_request[request_id]


class OtlpServicer:
    """Implement OTLP's trace service, so that any exporter can send spans here."""

    def __init__(self, store: TraceStore) -> None:
        self._store = store

    async def Export(
        self,
        request: trace_service_pb2.ExportTraceServiceRequest,
        context: grpc.aio.ServicerContext[
            trace_service_pb2.ExportTraceServiceRequest, trace_service_pb2.ExportTraceServiceResponse
        ],
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        """Store the spans."""
        for resource_spans in request.resource_spans:
            self._store.add(resource_spans)
        return trace_service_pb2.ExportTraceServiceResponse()
