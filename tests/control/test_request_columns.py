"""The columns of a report have what its rows have."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from tailrace.messages import request_view
from tailrace.request_columns import columns_from, full, optional_of, picked, traceparents_of, value_of
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
# How a column is called, where it is not as the field of a row.
PLURALS = {"epoch": "epochs", "phase": "phases", "state": "states"}
rows = st.lists(requests, max_size=5, unique_by=lambda row: row.request_id)


@given(rows)
def test_columns_hold_what_the_rows_do(rows: list[monitor_pb2.RequestReport]) -> None:
    columns = monitor_pb2.RequestColumns.FromString(columns_from(rows).SerializeToString())
    assert columns.request_ids == [row.request_id for row in rows]
    assert traceparents_of(columns) == {row.request_id: row.traceparent for row in rows if row.traceparent}
    for number, row in enumerate(rows):
        assert columns.frontend_ids[value_of(columns.frontends, number, 0)] == row.frontend_id
        for field in row.DESCRIPTOR.fields:
            column = getattr(columns, PLURALS.get(field.name, field.name), None)
            if column is None:
                continue
            if field.has_presence:
                given = dict(row.ListFields()).get(field)
                assert optional_of(column, number) == given, field.name
            else:
                assert value_of(column, number, 0) == getattr(row, field.name), field.name


@given(rows, st.randoms(use_true_random=False))
def test_picked_rows_are_the_columns_of_these_rows(
    rows: list[monitor_pb2.RequestReport], draw: random.Random
) -> None:
    chosen = draw.sample(range(len(rows)), k=draw.randint(0, len(rows)))
    found, wanted = picked(columns_from(rows), chosen), columns_from(rows[number] for number in chosen)
    assert found.request_ids == wanted.request_ids
    assert traceparents_of(found) == traceparents_of(wanted)
    for row in range(len(chosen)):
        assert repr(request_view("i", 16, 4_096, found, row)) == repr(
            request_view("i", 16, 4_096, wanted, row)
        )


def test_columns_of_defaults_are_not_sent() -> None:
    columns = columns_from([monitor_pb2.RequestReport(request_id="a"), monitor_pb2.RequestReport()])
    assert {field.name for field, _ in columns.ListFields()} == {"request_ids", "frontend_ids"}


def test_short_columns_are_completed_with_defaults() -> None:
    columns = monitor_pb2.RequestColumns(
        request_ids=["a", "b"], output_tokens=[7], frontends=[9, 9], kv_blocks=[1, 2, 3]
    )
    assert full(columns.output_tokens, 2, 0) == [7, 0]
    assert full(columns.kv_blocks, 2, 0) == [1, 2]
    seen = request_view("i", 16, 4_096, columns, 1)
    assert (seen.output_tokens, seen.frontend_id, seen.predicted_remaining_tokens) == (0, "", None)
