"""The rendered tree of a trace."""

import pytest
from google.protobuf.message import DecodeError
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status, TracesData
from rich.console import Console

from tailrace.telemetry.tree import render_tree

TRACE = bytes(range(16))
MS = 1_000_000
ZERO = 1_700_000_000_000 * MS


def _value(value: str | int | float | bool) -> AnyValue:
    match value:
        case str():
            return AnyValue(string_value=value)
        case bool():
            return AnyValue(bool_value=value)
        case int():
            return AnyValue(int_value=value)
        case float():
            return AnyValue(double_value=value)


def _pairs(values: dict[str, str | int | float | bool]) -> list[KeyValue]:
    return [KeyValue(key=k, value=_value(v)) for k, v in values.items()]


def _span(
    name: str, number: int, parent: int, start_ms: float, end_ms: float, **about: str | int | float | bool
) -> Span:
    return Span(
        trace_id=TRACE,
        span_id=number.to_bytes(8, "big"),
        parent_span_id=parent.to_bytes(8, "big") if parent else b"",
        name=name,
        start_time_unix_nano=ZERO + int(start_ms * MS),
        end_time_unix_nano=ZERO + int(end_ms * MS),
        attributes=_pairs({f"tailrace.{k.replace('__', '.')}": v for k, v in about.items()}),
    )


def _traces(**processes: list[Span]) -> bytes:
    traces = TracesData()
    for process, spans in processes.items():
        service, _, instance = process.partition("_")
        about = _pairs({"service.name": f"tailrace-{service}", "service.instance.id": instance})
        traces.resource_spans.append(
            ResourceSpans(resource=Resource(attributes=about), scope_spans=[ScopeSpans(spans=spans)])
        )
    return traces.SerializeToString()


def _text(data: bytes, width: int = 200) -> list[str]:
    console = Console(width=width, no_color=True)
    with console.capture() as capture:
        console.print(render_tree(data))
    return capture.get().splitlines()


def _name(line: str) -> str:
    return line.lstrip("│├└─ ·").split()[0]


def _example_trace() -> bytes:
    broken = _span("round", 8, 7, 330, 331, migration__round=2)
    broken.status.CopyFrom(Status(code=Status.STATUS_CODE_ERROR, message="checksum"))
    answering = _span("answering", 5, 1, 400, 900, phase="answering")
    answering.events.add(name="preempted", time_unix_nano=ZERO + 500 * MS)
    return _traces(
        # Out of order, as exporters send them.
        worker_b=[
            answering,
            broken,
            _span("round", 6, 7, 301, 330, migration__round=1, migration__bytes=3 * 1024 * 1024),
        ],
        frontend_f=[_span("request", 1, 0, 0, 1000, request_id="chatcmpl-1", outcome="stop")],
        scheduler_s=[_span("place", 2, 1, 1, 1.5, policy="pascal")],
        worker_a=[_span("prefill", 3, 1, 2, 50, instance="a"), _span("reasoning", 4, 1, 50, 400)],
        migration_m=[
            _span("migration", 7, 1, 300, 340, reason="phase", migration__pause_ms=9.123456, instance="b")
        ],
    )


def test_spans_are_in_chronological_order() -> None:
    lines = _text(_example_trace())
    assert "8 spans, 5 processes, 1,000.0 ms, 1 error" in lines[0]
    assert [_name(line) for line in lines[2:]] == [
        "request",
        "place",
        "prefill",
        "reasoning",
        "migration",
        "round",
        "round",
        "answering",
        "preempted",
    ]


def test_lines_have_no_trailing_spaces() -> None:
    assert [line for line in _text(_example_trace()) if line != line.rstrip()] == []


def test_a_line_has_process_start_duration_and_attributes() -> None:
    assert "  request chatcmpl-1  8 spans" in _text(_example_trace())[0]
    lines = {_name(line): line for line in _text(_example_trace())}
    assert lines["request"].split() == [
        "request",
        "frontend@f",
        "+0.0",
        "1,000.0",
        "outcome=stop",
    ]
    assert lines["migration"].split()[2:] == [
        "migration@m",
        "+300.0",
        "40.0",
        "reason=phase",
        "instance=b",
        "pause_ms=9.123",
    ]
    # The instance is in the process column.
    assert "instance=" not in lines["prefill"]
    assert lines["preempted"].split()[-1] == "+500.0"


def test_bytes_and_errors() -> None:
    rounds = [line for line in _text(_example_trace()) if _name(line) == "round"]
    assert any("round=1 bytes=3 MiB" in line for line in rounds)
    assert any("ERROR checksum round=2" in line for line in rounds)


def test_spans_with_a_missing_parent() -> None:
    data = _traces(worker_a=[_span("prefill", 3, 1, 2, 50), _span("step", 4, 3, 3, 4)])
    lines = _text(data)
    assert lines[2] == "(still running, or lost)"
    assert lines[3].startswith("└─ prefill")
    assert lines[4].startswith("   └─ step")


def test_a_parent_of_the_client_does_not_count_as_missing() -> None:
    lines = _text(_traces(frontend_f=[_span("request", 1, 99, 0, 10)]))
    assert lines[2].startswith("request")
    assert lines[2].endswith("(continues the client's trace)")


def test_duplicate_spans_and_cycles() -> None:
    twice = _traces(worker_a=[_span("a", 1, 0, 0, 1), _span("a", 1, 0, 0, 1)])
    assert len(_text(twice)) == 3
    loop = _traces(worker_a=[_span("x", 1, 2, 0, 1), _span("y", 2, 1, 0, 1), _span("z", 3, 3, 0, 1)])
    assert [_name(line) for line in _text(loop)[3:]] == ["x", "y", "z"]


def test_empty_and_malformed_data() -> None:
    assert _text(b"") == ["no spans"]
    with pytest.raises(DecodeError):
        render_tree(b"\xff\xff")
