"""Read OTLP spans into trees; siblings are in order of time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status, TracesData

from tailrace.telemetry.attributes import REQUEST_SPAN

Value = str | bool | int | float | list[str]


@dataclass(frozen=True, slots=True)
class Event:
    """An event of a span."""

    name: str
    at_ns: int
    attributes: Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class Node:
    """A span with its children. Times in nanoseconds since the Unix epoch."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    # The kind of service, without "tailrace-", and the id of the process.
    service: str
    instance: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Value]
    events: Sequence[Event]
    # None: no error; "": an error without a message.
    error: str | None
    children: Sequence[Node]


@dataclass(frozen=True, slots=True)
class Trace:
    """All spans of one trace id."""

    trace_id: str
    # Spans without a parent, and a request's span whose parent is the client's.
    roots: Sequence[Node]
    # Spans whose parent was not received, because it has not ended yet or was lost.
    orphans: Sequence[Node]

    @property
    def start_ns(self) -> int:
        """Return the start of the first span."""
        return min(node.start_ns for node in self.walk())

    @property
    def end_ns(self) -> int:
        """Return the end of the last span."""
        return max(node.end_ns for node in self.walk())

    def walk(self) -> Iterable[Node]:
        """Yield every span, parents first."""
        waiting = [*reversed(self.orphans), *reversed(self.roots)]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(reversed(node.children))


def read_traces(traces_data: bytes) -> list[Trace]:
    """Read traces from a serialized `opentelemetry.proto.trace.v1.TracesData`, in order of time.

    Duplicate spans count once. Raise google.protobuf.message.DecodeError for other bytes.
    """
    by_trace: dict[bytes, dict[bytes, tuple[Resource, Span]]] = defaultdict(dict)
    for resource_spans in TracesData.FromString(traces_data).resource_spans:
        for scope in resource_spans.scope_spans:
            for span in scope.spans:
                by_trace[span.trace_id][span.span_id] = (resource_spans.resource, span)
    traces = [_trace(trace_id, spans) for trace_id, spans in by_trace.items()]
    return sorted(traces, key=lambda trace: trace.start_ns)


def _trace(trace_id: bytes, spans: Mapping[bytes, tuple[Resource, Span]]) -> Trace:
    below: dict[bytes, list[bytes]] = defaultdict(list)
    for span_id, (_, span) in sorted(spans.items(), key=lambda item: item[1][1].start_time_unix_nano):
        below[span.parent_span_id].append(span_id)
    seen: set[bytes] = set()

    def node(span_id: bytes) -> Node:
        seen.add(span_id)
        resource, span = spans[span_id]
        # Skip a span that is its own ancestor: data from a faulty sender must not hang the reader.
        children = [node(child) for child in below[span_id] if child not in seen]
        return _node(resource, span, children)

    tops = [span_id for parent, ids in below.items() if parent not in spans for span_id in ids]
    nodes = [node(span_id) for span_id in tops]
    nodes += [node(span_id) for span_id in spans if span_id not in seen]
    nodes.sort(key=lambda top: top.start_ns)
    roots = [top for top in nodes if _is_root(top)]
    return Trace(trace_id.hex(), roots, [top for top in nodes if not _is_root(top)])


def _is_root(node: Node) -> bool:
    return not node.parent_id or node.name == REQUEST_SPAN


def _node(resource: Resource, span: Span, children: Sequence[Node]) -> Node:
    about = _plain(resource.attributes)
    return Node(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        name=span.name,
        service=str(about.get("service.name", "unknown")).removeprefix("tailrace-"),
        instance=str(about.get("service.instance.id", "")),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_plain(span.attributes),
        events=[Event(event.name, event.time_unix_nano, _plain(event.attributes)) for event in span.events],
        error=span.status.message if span.status.code == Status.STATUS_CODE_ERROR else None,
        children=children,
    )


def _plain(pairs: Iterable[KeyValue]) -> dict[str, Value]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Value:
    match value.WhichOneof("value"):
        case "bool_value":
            return bool(value.bool_value)
        case "int_value":
            return int(value.int_value)
        case "double_value":
            return float(value.double_value)
        case "array_value":
            return [str(_value(item)) for item in value.array_value.values]
        case _:
            return str(value.string_value)
