"""Requests as reported and changed since: counts and prompts equal those of the requests themselves."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.cluster import Phase, RequestState, RequestView
from tailrace.control.cluster_model import CountedRequest
from tailrace.control.reported_requests import ReportedRequests, ReportedRows
from tailrace.perf.remaining import expected_remaining
from tailrace.policy.requests import Column, RequestTable, decodes, movable
from tailrace.request_columns import columns_from
from tailrace.v1 import monitor_pb2, types_pb2

NAMES = [f"r{number}" for number in range(6)]

rows = st.builds(
    monitor_pb2.RequestReport,
    phase=st.sampled_from(types_pb2.Phase.values()),
    state=st.sampled_from(types_pb2.RequestState.values()),
    prompt_tokens=st.integers(1, 2),
    output_tokens=st.integers(0, 3),
    pacer_slack_tokens=st.none() | st.sampled_from([-2.0, 0.0, 3.0]),
    phase_tokens=st.sampled_from([0, 1, 199, 200, 499, 500]),
    demoted=st.booleans(),
    arrival_s=st.sampled_from([0.0, 1.0]),
    kv_blocks=st.integers(0, 2),
    epoch=st.integers(0, 1),
    max_tokens=st.just(4),
    predicted_remaining_tokens=st.none() | st.sampled_from([0.0, 2.5, 9.0]),
    host_kv_blocks=st.integers(0, 1),
)
views = st.builds(
    RequestView,
    request_id=st.just(""),
    instance_id=st.just("a"),
    phase=st.sampled_from(Phase),
    state=st.sampled_from(RequestState),
    prompt_tokens=st.integers(1, 2),
    output_tokens=st.just(1),
    max_tokens=st.just(1),
    host_kv_tokens=st.sampled_from([0, 16]),
    pacer_slack_tokens=st.none() | st.sampled_from([-2.0, 0.0, 3.0]),
    phase_tokens=st.sampled_from([0, 1, 199, 200, 499, 500]),
    demoted=st.booleans(),
)


def named(view: RequestView, request_id: str) -> RequestView:
    """Return the view of another request."""
    fields = {name: getattr(view, name) for name in RequestView.__slots__}
    return RequestView(**{**fields, "request_id": request_id})


def reported(rows: dict[str, monitor_pb2.RequestReport]) -> ReportedRows:
    """Return the rows of a report with these requests."""
    for name, row in rows.items():
        row.request_id = name
    return ReportedRows("a", 16, 4_096, columns_from(rows.values()))


@given(
    st.dictionaries(st.sampled_from(NAMES), rows),
    st.dictionaries(st.sampled_from(NAMES), st.none() | views),
    st.lists(views, max_size=2),
    st.sampled_from(["", *NAMES]),
    st.sampled_from([200, 500]),
)
def test_counts_equal_those_of_the_requests(
    rows: dict[str, monitor_pb2.RequestReport],
    changes: dict[str, RequestView | None],
    pending: Sequence[RequestView],
    without: str,
    quantum: int,
) -> None:
    changed = {name: view if view is None else named(view, name) for name, view in changes.items()}
    placed = [named(view, f"pending-{number}") for number, view in enumerate(pending)]
    requests = ReportedRequests(reported(rows), changed, placed)
    held = tuple(requests)
    assert len(requests) == len(held)
    gone = {name for name, view in changed.items() if view is None}
    assert {r.request_id for r in held} == ({*rows, *changed} - gone) | {r.request_id for r in placed}
    for number in (quantum, 200, quantum):
        assert requests.phase_load(number, without) == RequestTable(held).phase_load(number, without)
    # Of tables of the same report, each differs from it in its own way.
    kept = reported(rows)
    for table in (ReportedRequests(kept, changed, placed), ReportedRequests(kept, {}, ()), requests):
        assert table.reasoning() == pytest.approx(RequestTable(tuple(table)).reasoning())
    for column in vars(RequestTable).values():
        if isinstance(column, Column):
            found, wanted = getattr(requests, column.name), column.of(held)
            assert found.dtype == wanted.dtype and repr(found) == repr(wanted), column.name
    # Tables that have made no views yet answer by column.
    untouched = ReportedRequests(reported(rows), changed, placed)
    assert untouched.ids == [r.request_id for r in held]
    assert untouched.context_tokens.tolist() == [r.context_tokens for r in held]
    assert untouched.expected_remaining_tokens.tolist() == list(map(expected_remaining, held))
    assert untouched.movable.tolist() == list(map(movable, held))
    assert untouched.any_decoding() == RequestTable(held).any_decoding() == any(map(decodes, held))
    assert untouched.decoding.tolist() == list(map(decodes, held))
    assert [untouched.view(row) for row in range(len(held))] == list(held)
    for tokens in (0, 3, 9):
        outgrown = untouched.where(untouched.context_tokens >= tokens)
        assert outgrown == [r for r in held if r.context_tokens >= tokens]
    assert untouched.where(untouched.in_prefill) == [r for r in held if r.phase is Phase.PREFILL]
    prompts = [(r.arrival_s, r.prompt_tokens) for r in held if r.phase is Phase.PREFILL]
    assert sorted(requests.prompts()) == sorted(prompts)


@given(st.dictionaries(st.sampled_from(NAMES), rows, min_size=1))
def test_a_request_is_counted_as_its_view_says(rows: dict[str, monitor_pb2.RequestReport]) -> None:
    requests = reported(rows)
    for name in rows:
        view = requests.view(name)
        has_slot = view.state in (RequestState.RUNNING, RequestState.PAUSED)
        assert requests.counted(name) == CountedRequest(view.context_tokens, view.kv_tokens, has_slot)
        assert requests.prompt_tokens(name) == view.prompt_tokens


def test_columns_cannot_be_written_to() -> None:
    """Policies and shadows share them."""
    row = monitor_pb2.RequestReport(request_id="r0", prompt_tokens=1)
    requests = ReportedRequests(reported({"r0": row}), {}, ())
    for table in (requests, RequestTable(tuple(requests))):
        for name in [name for name, value in vars(RequestTable).items() if isinstance(value, Column)]:
            with pytest.raises(ValueError, match="read-only"):
                getattr(table, name)[:] = 0
