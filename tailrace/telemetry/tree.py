"""Render traces as trees for humans; programs use OTLP's JSON."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status, TracesData
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from tailrace.telemetry import attributes
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


_PREFIX: Final = "tailrace."
# Explanations first, then figures; other attributes follow in their original order.
_ORDER: Final = (
    attributes.REQUEST_ID,
    attributes.REASON,
    attributes.POLICY,
    attributes.PHASE,
    attributes.INSTANCE,
    attributes.MIGRATION_SOURCE,
    attributes.MIGRATION_TARGET,
    attributes.MIGRATION_STATE,
    attributes.MIGRATION_ROUND,
    attributes.MIGRATION_ROUNDS,
    attributes.MIGRATION_BLOCKS,
    attributes.MIGRATION_BYTES,
    attributes.MIGRATION_PAUSE_MS,
    attributes.MIGRATION_PAUSE_STEPS,
)
_KIB: Final = 1024.0


def render_tree(traces_data: bytes) -> RenderableType:
    """Render a serialized `opentelemetry.proto.trace.v1.TracesData` for a rich console.

    One line per span, children indented, siblings in order of time. Columns: span, service@instance, start in
    milliseconds since the trace's first span, duration in milliseconds, attributes. Raise
    google.protobuf.message.DecodeError for other bytes.
    """
    traces = read_traces(traces_data)
    if not traces:
        return Text("no spans")
    return Group(
        *(part for trace in traces for part in (_headline(trace), _Trimmed(_table(_without_its_id(trace)))))
    )


class _Trimmed:
    """Render without trailing blanks, for copying lines and for pipes."""

    def __init__(self, inner: RenderableType) -> None:
        self._inner = inner

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in console.render_lines(self._inner, options, pad=False):
            while line and not line[-1].text.strip():
                line.pop()
            yield from line[:-1]
            for last in line[-1:]:
                yield Segment(last.text.rstrip(), last.style)
            yield Segment.line()


def _headline(trace: Trace) -> Text:
    spans = list(trace.walk())
    services = {(span.service, span.instance) for span in spans}
    failed = sum(span.error is not None for span in spans)
    line = Text(f"trace {trace.trace_id}", style="bold")
    if request_id := _only_request(trace):
        line.append(f"  request {request_id}", style="not bold")
    line.append(f"  {_count(len(spans), 'span')}, {_count(len(services), 'process', 'processes')}")
    line.append(f", {_ms(trace.end_ns - trace.start_ns):,.1f} ms", style="not bold")
    if failed:
        line.append(f", {_count(failed, 'error')}", style="red")
    return line


def _only_request(trace: Trace) -> str:
    """Return the id of the request that the whole trace is of; empty if there are several."""
    ids = {str(node.attributes.get(attributes.REQUEST_ID, "")) for node in trace.walk()} - {""}
    return ids.pop() if len(ids) == 1 else ""


def _without_its_id(trace: Trace) -> Trace:
    """Return the trace without the request's id in its spans, if the headline has it."""
    if not _only_request(trace):
        return trace

    def stripped(nodes: Sequence[Node]) -> list[Node]:
        return [
            replace(
                node,
                attributes={k: v for k, v in node.attributes.items() if k != attributes.REQUEST_ID},
                children=stripped(node.children),
            )
            for node in nodes
        ]

    return replace(trace, roots=stripped(trace.roots), orphans=stripped(trace.orphans))


def _table(trace: Trace) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("span", no_wrap=True)
    table.add_column("where", no_wrap=True, style="cyan")
    table.add_column("start ms", no_wrap=True, justify="right", style="dim")
    table.add_column("ms", no_wrap=True, justify="right")
    table.add_column("about", overflow="fold")
    for root in trace.roots:
        _add(table, root, trace.start_ns, "", "", client=bool(root.parent_id))
    if trace.orphans:
        table.add_row(Text("(still running, or lost)", style="dim"))
        _add_all(table, trace.orphans, [], trace.start_ns, "")
    return table


def _add(table: Table, node: Node, zero_ns: int, lead: str, indent: str, *, client: bool = False) -> None:
    name = Text(lead, style="dim")
    name.append(node.name, style="not dim bold red" if node.error is not None else "not dim bold")
    about = _attributes_text(node)
    if client:
        about.append(" (continues the client's trace)", style="dim")
    table.add_row(
        name,
        f"{node.service}@{node.instance}" if node.instance else node.service,
        f"+{_ms(node.start_ns - zero_ns):,.1f}" if node.start_ns >= zero_ns else "",
        f"{_ms(node.end_ns - node.start_ns):,.1f}",
        about,
    )
    _add_all(table, node.children, node.events, zero_ns, indent)


def _add_all(table: Table, nodes: Sequence[Node], events: Sequence[Event], zero_ns: int, indent: str) -> None:
    """Add the spans and events of one level, in order of time."""
    level: list[Node | Event] = sorted([*nodes, *events], key=_time_ns)
    for number, item in enumerate(level):
        last = number == len(level) - 1
        lead = indent + ("└─ " if last else "├─ ")
        if isinstance(item, Node):
            _add(table, item, zero_ns, lead, indent + ("   " if last else "│  "))
        else:
            table.add_row(
                Text(f"{lead}· {item.name}", style="dim"),
                "",
                f"+{_ms(item.at_ns - zero_ns):,.1f}",
                "",
                Text(
                    " ".join(
                        f"{_short_key(key)}={_format_value(key, v)}" for key, v in item.attributes.items()
                    )
                ),
            )


def _time_ns(item: Node | Event) -> int:
    return item.start_ns if isinstance(item, Node) else item.at_ns


def _attributes_text(node: Node) -> Text:
    text = Text()
    if node.error is not None:
        text.append(f"ERROR {node.error}".rstrip(), style="bold red")
    for key, value in _ordered(node):
        text.append(f"{' ' if text else ''}{_short_key(key)}=", style="dim")
        text.append(_format_value(key, value))
    return text


def _ordered(node: Node) -> Iterator[tuple[str, Value]]:
    for key in _ORDER:
        # Skip the instance if the column before shows it.
        if key in node.attributes and not (
            key == attributes.INSTANCE and node.attributes[key] == node.instance
        ):
            yield key, node.attributes[key]
    for key, value in node.attributes.items():
        if key not in _ORDER:
            yield key, value


def _short_key(key: str) -> str:
    return key.removeprefix(_PREFIX).removeprefix("migration.")


def _format_value(key: str, value: Value) -> str:
    if key == attributes.MIGRATION_BYTES and isinstance(value, int):
        return _bytes(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ",".join(value)
    return str(value)


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < _KIB:
            return f"{count:.4g} {unit}"
        count /= _KIB
    return f"{count:.4g} GiB"


def _ms(nanoseconds: int) -> float:
    return round(nanoseconds / 1e6, 3)


def _count(number: int, singular: str, plural: str = "") -> str:
    return f"{number} {singular if number == 1 else plural or singular + 's'}"
