"""Render traces as trees for humans; programs use OTLP's JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from tailrace.telemetry import attributes
from tailrace.telemetry.spans import Event, Node, Trace, Value, read_traces

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
    return Group(*(part for trace in traces for part in (_headline(trace), _Trimmed(_table(trace)))))


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
    line.append(f"  {_count(len(spans), 'span')}, {_count(len(services), 'process', 'processes')}")
    line.append(f", {_ms(trace.end_ns - trace.start_ns):,.1f} ms", style="not bold")
    if failed:
        line.append(f", {_count(failed, 'error')}", style="red")
    return line


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
        table.add_row(Text("(parent not received)", style="dim"))
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
