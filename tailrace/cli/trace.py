"""`tailrace trace`: show a request's trace through all services, without a tracing backend."""

from __future__ import annotations

from typing import Final

import click
from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from tailrace.cli.admin import CALL_TIMEOUT_S, admin_option, connect
from tailrace.cli.errors import CliError
from tailrace.cli.output import Output, output_option, print_figures, print_json
from tailrace.cli.plain import JsonValue
from tailrace.telemetry.tree import render_tree
from tailrace.v1.admin_pb2 import GetTraceRequest

_HINT: Final = (
    "pass a request ID (or a unique part of it), the ID that its client chose or got, or a 32-digit trace ID;"
    " spans arrive within seconds"
)


@click.command(epilog="Example: tailrace trace chatcmpl-8f3a")
@click.argument("identity", metavar="REQUEST_OR_TRACE_ID")
@output_option(Output.TREE)
@admin_option
def trace(identity: str, output: Output, admin: str | None) -> None:
    """Print a request's trace: placement, prefill, phases, and every migration with its rounds.

    With -o json: OTLP as JSON, IDs in hexadecimal.
    """
    with connect(admin) as connection, connection.errors(_HINT):
        reply = connection.stub.GetTrace(GetTraceRequest(id=identity), timeout=CALL_TIMEOUT_S)
    if not reply.traces_data:
        raise CliError(f"no spans of {identity!r}; {_HINT}")
    if output is Output.JSON:
        print_json(_otlp_json(reply.traces_data))
    else:
        print_figures(render_tree(reply.traces_data))


def _otlp_json(data: bytes) -> dict[str, JsonValue]:
    """Convert to OTLP's JSON encoding: that of protobuf, but with trace and span ids in hexadecimal."""
    traces = TracesData.FromString(data)
    plain: dict[str, JsonValue] = MessageToDict(traces)
    spans = [
        span for resource in traces.resource_spans for scope in resource.scope_spans for span in scope.spans
    ]
    for span, encoded in zip(spans, _encoded_spans(plain), strict=True):
        encoded["traceId"] = span.trace_id.hex()
        encoded["spanId"] = span.span_id.hex()
        if span.parent_span_id:
            encoded["parentSpanId"] = span.parent_span_id.hex()
        for link, encoded_link in zip(span.links, _dicts(encoded, "links"), strict=True):
            encoded_link["traceId"] = link.trace_id.hex()
            encoded_link["spanId"] = link.span_id.hex()
    return plain


def _encoded_spans(plain: dict[str, JsonValue]) -> list[dict[str, JsonValue]]:
    return [
        span
        for resource in _dicts(plain, "resourceSpans")
        for scope in _dicts(resource, "scopeSpans")
        for span in _dicts(scope, "spans")
    ]


def _dicts(parent: dict[str, JsonValue], key: str) -> list[dict[str, JsonValue]]:
    children = parent.get(key, [])
    if not isinstance(children, list):
        raise TypeError(f"{key} is not a list")
    return [child for child in children if isinstance(child, dict)]
