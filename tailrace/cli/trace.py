"""`tailrace trace`: show a request's trace through all services, without a tracing backend."""

from __future__ import annotations

from base64 import b64decode
from typing import Any, Final

import click
from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from tailrace.cli.admin import CALL_TIMEOUT_S, admin_option, connect
from tailrace.cli.errors import CliError
from tailrace.cli.output import Output, output_option, print_figures, print_json
from tailrace.telemetry.tree import render_tree
from tailrace.v1.admin_pb2 import GetTraceRequest

_IDS: Final = frozenset({"traceId", "spanId", "parentSpanId"})
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
        print_json(_hexadecimal(MessageToDict(TracesData.FromString(reply.traces_data))))
    else:
        print_figures(render_tree(reply.traces_data))


def _hexadecimal(value: Any) -> Any:
    """Return protobuf's JSON as OTLP's, which differs in this: ids are in hexadecimal, not in base64."""
    if isinstance(value, list):
        return [_hexadecimal(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        name: b64decode(inner).hex() if name in _IDS else _hexadecimal(inner) for name, inner in value.items()
    }
