"""Requests by row and by column contain the same."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tailrace.messages import request_view
from tailrace.request_columns import columns_from, columns_of, full, rows_from
from tailrace.v1 import monitor_pb2, types_pb2

tokens = st.sampled_from([0, 1, 500, 2**32 - 1])
optional = st.none() | st.sampled_from([-2.5, 0.0, 3.0, float("inf")])
requests = st.builds(
    monitor_pb2.RequestReport,
    request_id=st.text(max_size=3),
    frontend_id=st.sampled_from(["", "f", "g"]),
    epoch=tokens,
    phase=st.sampled_from(types_pb2.Phase.values()) | st.just(17),
    state=st.sampled_from(types_pb2.RequestState.values()),
    prompt_tokens=tokens,
    output_tokens=tokens,
    reasoning_tokens=tokens,
    max_tokens=tokens,
    kv_blocks=tokens,
    host_kv_blocks=tokens,
    arrival_s=st.sampled_from([0.0, 1.5]),
    token_interval_ms=st.sampled_from([0.0, 12.5]),
    pacer_slack_tokens=optional,
    qoe=optional,
    phase_tokens=tokens,
    demoted=st.booleans(),
    predicted_remaining_tokens=optional,
    traceparent=st.sampled_from(["", "00-1-2-01"]),
)
rows = st.lists(requests, max_size=5, unique_by=lambda row: row.request_id)


@given(rows)
def test_rows_converted_to_columns_and_back_are_equal(rows: list[monitor_pb2.RequestReport]) -> None:
    columns = monitor_pb2.RequestColumns.FromString(columns_from(rows).SerializeToString())
    assert rows_from(columns) == rows


@given(rows)
def test_a_report_has_columns_whichever_way_it_was_sent(rows: list[monitor_pb2.RequestReport]) -> None:
    columns = columns_from(rows)
    by_row = monitor_pb2.WorkerReport(requests=rows)
    by_column = monitor_pb2.WorkerReport(request_columns=columns)
    assert columns_of(by_row) == columns_of(by_column) == columns


def test_columns_of_defaults_are_not_sent() -> None:
    columns = columns_from([monitor_pb2.RequestReport(request_id="a"), monitor_pb2.RequestReport()])
    assert {field.name for field, _ in columns.ListFields()} == {"request_ids", "frontend_ids"}


def test_short_columns_are_completed_with_defaults() -> None:
    columns = monitor_pb2.RequestColumns(
        request_ids=["a", "b"], output_tokens=[7], frontends=[9, 9], kv_blocks=[1, 2, 3]
    )
    assert full(columns.output_tokens, 2, 0) == [7, 0]
    assert full(columns.kv_blocks, 2, 0) == [1, 2]
    assert [row.output_tokens for row in rows_from(columns)] == [7, 0]
    seen = request_view("i", 16, 4_096, columns, 1)
    assert (seen.output_tokens, seen.frontend_id, seen.predicted_remaining_tokens) == (0, "", None)
