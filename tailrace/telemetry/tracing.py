"""OpenTelemetry spans, exported over OTLP gRPC when an endpoint is set.

Without OTEL_EXPORTER_OTLP_ENDPOINT the SDK is not imported, and the tracers are the API's no-op ones; callers
that check `Tracing.enabled` have no cost per request. The SDK's own environment variables (sampler, attribute
limits, OTEL_SDK_DISABLED, headers, certificates) keep their meaning.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Final, Self, cast

from opentelemetry.context import Context
from opentelemetry.trace import (
    NoOpTracer,
    Span,
    SpanKind,
    Status,
    StatusCode,
    Tracer,
    format_trace_id,
    get_current_span,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tailrace.security.transport import DIRECT

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

ENDPOINT_VARIABLE: Final = "OTEL_EXPORTER_OTLP_ENDPOINT"
# The exporters' type says that all values are strings.
OTLP_CHANNEL: Final = cast("tuple[tuple[str, str]]", (DIRECT,))
"""Options of the channel of an exporter."""

AttributeValue = str | bool | int | float
Attributes = Mapping[str, AttributeValue]

# Spans are queued in memory at most this long, and at most this many; further spans are dropped.
_SCHEDULE_MS: Final = 500
_QUEUE_SPANS: Final = 8192
_BATCH_SPANS: Final = 512
_EXPORT_TIMEOUT_S: Final = 3
_PROPAGATOR: Final = TraceContextTextMapPropagator()


class Tracing:
    """The tracing of a process, created by `configure`."""

    def __init__(self, provider: TracerProvider | None) -> None:
        self._provider = provider

    @property
    def enabled(self) -> bool:
        """Return whether spans are exported; if not, callers need not create them."""
        return self._provider is not None

    def tracer(self, name: str) -> Tracer:
        """Return a tracer; `name`: the part of the service that creates the spans."""
        return NoOpTracer() if self._provider is None else self._provider.get_tracer(name)

    def continues(self, traceparent: str) -> bool:
        """Return whether to create spans under a parent received in a message ("": the request is not
        traced)."""
        return self._provider is not None and traceparent != ""

    async def shutdown(self) -> None:
        """Send the queued spans and stop. This takes a few seconds at most, also without a receiver."""
        if self._provider is not None:
            await asyncio.to_thread(self._provider.shutdown)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()


def configure(service: str, instance: str) -> Tracing:
    """Set up tracing for this process from its environment.

    `service`: the kind of service ("frontend" becomes the service.name `tailrace-frontend`); `instance`: its
    id.
    """
    endpoint = os.environ.get(ENDPOINT_VARIABLE, "")
    disabled = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if not endpoint or disabled:
        return Tracing(None)
    # Imported here, so that processes without tracing do not load the SDK.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    from tailrace.telemetry.span_ids import SystemIds

    # The owner of the tracing shuts it down, not the interpreter's exit hooks.
    provider = TracerProvider(
        resource=resource_of(service, instance), shutdown_on_exit=False, id_generator=SystemIds()
    )
    exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_TIMEOUT_S, channel_options=OTLP_CHANNEL)
    provider.add_span_processor(
        BatchSpanProcessor(
            exporter,
            max_queue_size=_QUEUE_SPANS,
            schedule_delay_millis=_SCHEDULE_MS,
            max_export_batch_size=_BATCH_SPANS,
        )
    )
    return Tracing(provider)


def resource_of(service: str, instance: str) -> Resource:
    """Return what spans and log entries of a process say of it. Imports the SDK."""
    from opentelemetry.sdk.resources import Resource

    return Resource.create(
        {
            "service.name": f"tailrace-{service}",
            "service.instance.id": instance,
            "service.namespace": "tailrace",
            "service.version": package_version(),
        }
    )


def context_from_traceparent(traceparent: str) -> Context:
    """Return the parent context of a W3C traceparent; an empty one (a new trace) if it is "" or invalid."""
    return _PROPAGATOR.extract({"traceparent": traceparent}, context=Context())


def sampled_trace_of(traceparent: str) -> str:
    """Return the id of a W3C traceparent's trace in hex; "" if it is not sampled, or the text is invalid."""
    if not traceparent:
        return ""
    context = get_current_span(context_from_traceparent(traceparent)).get_span_context()
    return format_trace_id(context.trace_id) if context.is_valid and context.trace_flags.sampled else ""


def traceparent_of(span: Span) -> str:
    """Return the span's W3C traceparent for a message; "" if it is not recorded."""
    if not span.is_recording():
        return ""
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def start_span(
    tracer: Tracer,
    name: str,
    traceparent: str,
    *,
    start_ns: int | None = None,
    attributes: Attributes | None = None,
    kind: SpanKind = SpanKind.INTERNAL,
) -> Span:
    """Start a span under a parent given as a traceparent. The caller ends it with `end()`.

    `start_ns`: nanoseconds since the Unix epoch; None: now.
    """
    return tracer.start_span(
        name,
        context=context_from_traceparent(traceparent),
        kind=kind,
        attributes=attributes,
        start_time=start_ns,
    )


def record_span(
    tracer: Tracer,
    name: str,
    traceparent: str,
    start_ns: int,
    end_ns: int,
    *,
    attributes: Attributes | None = None,
    error: str = "",
) -> str:
    """Record a span after the fact, with known start and end in nanoseconds since the Unix epoch.

    A non-empty `error` marks it as failed. Return its traceparent, for children recorded in the same way.
    """
    span = start_span(tracer, name, traceparent, start_ns=start_ns, attributes=attributes)
    span_traceparent = traceparent_of(span)
    if error:
        fail(span, error)
    span.end(end_ns)
    return span_traceparent


def fail(span: Span, message: str) -> None:
    """Mark a span as failed."""
    span.set_status(Status(StatusCode.ERROR, message))


def wall_ns(monotonic_s: float) -> int:
    """Convert a reading of `time.monotonic()` (or the event loop's `time()`) to nanoseconds since the Unix
    epoch."""
    return time.time_ns() - int((time.monotonic() - monotonic_s) * 1e9)


def package_version() -> str:
    """Return the installed version of Tailrace; "unknown" if it runs from a tree that is not installed."""
    try:
        return version("tailrace")
    except PackageNotFoundError:
        return "unknown"
