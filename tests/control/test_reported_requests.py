"""Requests as reported and changed since: counts and prompts equal those of the requests themselves."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from hypothesis import given
from hypothesis import strategies as st

from tailrace.cluster import Phase, RequestState, RequestView
from tailrace.control.cluster_model import CountedRequest
from tailrace.control.reported_requests import ReportedRequests, ReportedRows
from tailrace.policy.columns import (
    expected_length_columns,
    expected_lengths,
    find_request,
    movable,
    movable_columns,
    movable_requests,
)
from tailrace.policy.decoding import any_decoding, decoding, in_prefill, lengths, migrating_tokens
from tailrace.policy.phase_load import ListsPrompts, phase_load, reasoning
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
        counted = phase_load(requests, quantum_tokens=number, without=without)
        assert counted == phase_load(held, quantum_tokens=number, without=without)
    assert reasoning(requests) == reasoning(held)
    columns, expected = movable_requests(requests), movable_columns(filter(movable, held))
    rows_of = [sorted(zip(*each, strict=True), key=itemgetter(0)) for each in (columns, expected)]
    assert repr(rows_of[0]) == repr(rows_of[1])
    assert all(find_request(requests, r.request_id) == r for r in held)
    growing, wanted_growing = expected_lengths(requests), expected_length_columns(held)
    assert sorted(zip(*growing, strict=True)) == sorted(zip(*wanted_growing, strict=True))
    for tokens in (0, 3, 9):
        assert requests.from_context(tokens) == [r for r in held if r.context_tokens >= tokens]
    for columns_of in (decoding, lengths):
        found, wanted = (sorted(zip(*columns_of(each), strict=True)) for each in (requests, held))
        assert found == wanted
    for answer in (any_decoding, migrating_tokens):
        assert answer(requests) == answer(held)
    assert list(in_prefill(requests)) == in_prefill(held)
    assert isinstance(requests, ListsPrompts)
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
