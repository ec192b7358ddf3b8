"""OpenTelemetry spans, exported over OTLP gRPC when an endpoint is set.

Without OTEL_EXPORTER_OTLP_ENDPOINT nothing of the SDK is imported and the tracers are the API's no-op ones;
ask `Tracing.enabled` once and a request costs nothing at all. The SDK's own environment variables (sampler,
attribute limits, OTEL_SDK_DISABLED, headers, certificates) keep their meaning.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Final, Self

from opentelemetry.context import Context
from opentelemetry.trace import NoOpTracer, Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

ENDPOINT_VARIABLE: Final = "OTEL_EXPORTER_OTLP_ENDPOINT"

AttributeValue = str | bool | int | float
Attributes = Mapping[str, AttributeValue]

# Spans wait in memory at most this long and in this number; what comes above it is dropped, never waited for.
_SCHEDULE_MS: Final = 500
_QUEUE_SPANS: Final = 8192
_BATCH_SPANS: Final = 512
_EXPORT_TIMEOUT_S: Final = 3
_PROPAGATOR: Final = TraceContextTextMapPropagator()


class Tracing:
    """One process's tracing. Made by `configure`; ended by `shutdown`, which sends what is still waiting."""

    def __init__(self, provider: TracerProvider | None) -> None:
        self._provider = provider

    @property
    def enabled(self) -> bool:
        """Whether spans go anywhere; if not, callers need not even make them."""
        return self._provider is not None

    def tracer(self, name: str) -> Tracer:
        """A tracer; `name` says which part of the service makes the spans."""
        return NoOpTracer() if self._provider is None else self._provider.get_tracer(name)

    def continues(self, traceparent: str) -> bool:
        """Whether to make spans under a parent handed over in a message ("": its request is not traced)."""
        return self._provider is not None and traceparent != ""

    async def shutdown(self) -> None:
        """Send what is waiting and stop. Takes seconds at most, also when nobody receives."""
        if self._provider is not None:
            await asyncio.to_thread(self._provider.shutdown)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()


def configure(service: str, instance: str) -> Tracing:
    """Set up tracing for this process from its environment.

    `service` is the kind of service (of "frontend" service.name is `tailrace-frontend`), `instance` its id.
    """
    endpoint = os.environ.get(ENDPOINT_VARIABLE, "")
    disabled = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if not endpoint or disabled:
        return Tracing(None)
    # Imported here: a process that does not trace does not pay for the SDK.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    from tailrace.telemetry.span_ids import SystemIds

    resource = Resource.create(
        {
            "service.name": f"tailrace-{service}",
            "service.instance.id": instance,
            "service.namespace": "tailrace",
            "service.version": package_version(),
        }
    )
    # Shut down by its owner, in order; not by the interpreter's exit hooks.
    provider = TracerProvider(resource=resource, shutdown_on_exit=False, id_generator=SystemIds())
    exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_TIMEOUT_S)
    provider.add_span_processor(
        BatchSpanProcessor(
            exporter,
            max_queue_size=_QUEUE_SPANS,
            schedule_delay_millis=_SCHEDULE_MS,
            max_export_batch_size=_BATCH_SPANS,
        )
    )
    return Tracing(provider)


def context_from_traceparent(traceparent: str) -> Context:
    """The parent context that a W3C traceparent names; an empty one (a new trace) for "" or nonsense."""
    return _PROPAGATOR.extract({"traceparent": traceparent}, context=Context())


def traceparent_of(span: Span) -> str:
    """The span as a W3C traceparent for a message; "" if it is not recorded."""
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
    """Start a span under a parent given as a traceparent. Its maker calls `end()`, at any later time.

    `start_ns`: nanoseconds since the Unix epoch, now if None.
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
    """Record a span after the fact: something that began and ended at known times (ns since the Unix epoch).

    A non-empty `error` marks it as failed. Returns its traceparent, for children recorded in the same way.
    """
    span = start_span(tracer, name, traceparent, start_ns=start_ns, attributes=attributes)
    own = traceparent_of(span)
    if error:
        fail(span, error)
    span.end(end_ns)
    return own


def fail(span: Span, message: str) -> None:
    """Mark a span as failed."""
    span.set_status(Status(StatusCode.ERROR, message))


def wall_ns(monotonic_s: float) -> int:
    """A reading of `time.monotonic()` (or the event loop's `time()`) as nanoseconds since the Unix epoch."""
    return time.time_ns() - int((time.monotonic() - monotonic_s) * 1e9)


def package_version() -> str:
    """The installed version of Tailrace; "unknown" when it runs from a tree that is not installed."""
    try:
        return version("tailrace")
    except PackageNotFoundError:
        return "unknown"
