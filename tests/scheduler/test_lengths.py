"""The scheduler keeps the lengths of a period; each request counts once on arrival and once on finish."""

from __future__ import annotations

from tailrace.cluster import Arrival
from tailrace.control.reported_cluster import ReportedCluster
from tests.scheduler.facts import (
    ANSWERING,
    GONE,
    event,
    members,
    report_to,
    request,
    set_members,
    steady,
)


def place(state: ReportedCluster, request_id: str, name: str, now_s: float, output_tokens: int = 0) -> None:
    arrival = Arrival(request_id, 100, 1_000, 0, output_tokens)
    state.place(arrival, name, now_s)


def state_with_lengths(period_s: float | None = 60.0) -> ReportedCluster:
    state = ReportedCluster()
    set_members(state, members("a", "b"), 0.0)
    state.keep_lengths(period_s, 0.0)
    return state


def rows(state: ReportedCluster, now_s: float = 9.0) -> tuple[int, list[tuple[int, int]]]:
    """Return the number of arrivals and the (prompt, output) tokens of finished requests."""
    lengths = state.lengths(now_s)
    assert lengths is not None
    prompts, outputs, _ = lengths.finished()
    return len(lengths.arrived()[0]), list(zip(prompts.tolist(), outputs.tolist(), strict=True))


def test_without_a_period_no_lengths_are_kept() -> None:
    state = state_with_lengths(None)
    place(state, "r", "a", 1.0)
    assert state.lengths(2.0) is None


def test_a_request_counts_from_placement_to_last_token() -> None:
    state = state_with_lengths()
    place(state, "r", "a", 1.0)
    report_to(state, event("a", "r", ANSWERING), 2.0)
    report_to(state, steady("a", [request("r", ANSWERING, output_tokens=30)]), 3.0)
    # The event has the exact number; the last report is half a second old.
    report_to(state, event("a", "r", GONE, output_tokens=41), 3.4)
    assert rows(state) == (1, [(100, 41)])
    report_to(state, steady("a"), 3.5)
    assert rows(state) == (1, [(100, 41)])


def test_a_request_that_no_report_contained_counts() -> None:
    state = state_with_lengths()
    place(state, "r", "a", 1.0)
    report_to(state, event("a", "r", GONE, output_tokens=2), 1.2)
    assert rows(state) == (1, [(100, 2)])


def test_a_request_without_a_last_token_has_not_finished() -> None:
    """It was aborted or migrated: at its target, the epoch shows that it is not an arrival."""
    state = state_with_lengths()
    place(state, "r", "a", 1.0)
    report_to(state, steady("a", [request("r")]), 2.0)
    report_to(state, event("a", "r", GONE, output_tokens=0), 3.0)
    report_to(state, event("b", "r", ANSWERING, epoch=1, output_tokens=30), 3.1)
    assert rows(state) == (1, [])
    report_to(state, event("b", "r", GONE, epoch=1, output_tokens=50), 4.0)
    assert rows(state) == (1, [(100, 50)])


def test_repeated_placements_and_unknown_requests_count_once() -> None:
    state = state_with_lengths()
    # A prompt that was returned, and a request resumed after the loss of its instance.
    place(state, "r", "a", 1.0)
    place(state, "r", "b", 2.0)
    place(state, "lost", "b", 2.5, output_tokens=20)
    report_to(state, steady("a", [request("other"), request("moved", epoch=2)]), 3.0)
    report_to(state, steady("a", [request("other"), request("moved", epoch=2)]), 4.0)
    assert rows(state) == (2, [])


def test_a_new_period_starts_empty() -> None:
    state = state_with_lengths()
    place(state, "r", "a", 1.0)
    state.keep_lengths(60.0, 2.0)
    assert rows(state)[0] == 1
    state.keep_lengths(30.0, 3.0)
    assert rows(state)[0] == 0
    state.keep_lengths(None, 4.0)
    assert state.lengths(5.0) is None
