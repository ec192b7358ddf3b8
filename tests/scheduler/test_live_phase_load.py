"""The inputs of PASCAL's algorithms, as the live scheduler counts them from reports and phase events."""

from __future__ import annotations

import pytest

from tailrace.actions import Migrate, Place
from tailrace.cluster import Arrival, Phase, PhaseLoad
from tailrace.control.reported_cluster import ReportedCluster
from tailrace.policy.pascal import Pascal
from tailrace.policy.requests import table_of
from tailrace.v1 import monitor_pb2, types_pb2
from tests.scheduler.facts import (
    ANSWERING,
    REASONING,
    event,
    members,
    report_to,
    request,
    set_members,
    steady,
)

ARRIVAL = Arrival("new", 100, 1_000, 0)


def blocked(request_id: str, state: types_pb2.RequestState.ValueType) -> monitor_pb2.RequestReport:
    """Return a request that waits off the device for its first answer token."""
    reported = request(request_id, ANSWERING, output_tokens=50)
    reported.state, reported.kv_blocks = state, 0
    return reported


def cluster(*reports: monitor_pb2.WorkerReport) -> ReportedCluster:
    """Return a state with these reports applied."""
    state = ReportedCluster()
    set_members(state, members(*[report.instance_id for report in reports]), 0.0)
    for report in reports:
        report_to(state, report, 1.0)
    return state


@pytest.mark.parametrize("off", [types_pb2.REQUEST_STATE_WAITING, types_pb2.REQUEST_STATE_PREEMPTED])
def test_algorithm_1_avoids_instances_with_a_blocked_answer(off: types_pb2.RequestState.ValueType) -> None:
    # Instance a has the smaller footprint and would otherwise be chosen.
    state = cluster(steady("a", [blocked("r", off)]), steady("b", [request("q"), request("p")]))
    assert Pascal().place(state.view(), ARRIVAL, 1.0) == Place("b")


def test_algorithm_2_avoids_instances_with_a_blocked_answer() -> None:
    waiting = blocked("r", types_pb2.REQUEST_STATE_WAITING)
    # No request reasons on a, so Algorithm 2 would choose it by r_i.
    state = cluster(
        steady("a", [waiting]), steady("b", [request("q")]), steady("c", [request("p"), request("ends")])
    )
    ending = state.request("ends")
    assert ending is not None
    # c itself has one other reasoning request, like b: the request stays.
    assert Pascal().on_reasoning_ended(state.view(), ending, 1.0) == ()
    report_to(state, steady("c", [request("p"), request("o"), request("ends")]), 1.1)
    moves = Pascal(growth_tokens=10**6).on_reasoning_ended(state.view(), ending, 1.1)
    assert [move.target_id for move in moves if isinstance(move, Migrate)] == ["b"]


def test_an_event_can_report_a_blocked_answer() -> None:
    state = cluster(steady("a", [request("r", REASONING)]))
    reported = event("a", "r", ANSWERING, output_tokens=50)
    reported.phase_events[0].state = types_pb2.REQUEST_STATE_PREEMPTED
    report_to(state, reported, 1.1)
    seen = state.view().instances["a"]
    assert table_of(seen.requests).phase_load().least_pacer_slack_tokens == float("-inf")
    assert (seen.running, seen.waiting) == (0, 1)


def test_a_request_that_enters_a_phase_is_running_by_default() -> None:
    waiting = request("r", types_pb2.PHASE_PREFILL)
    waiting.state = types_pb2.REQUEST_STATE_WAITING
    report = steady("a", [waiting])
    report.load.running, report.load.waiting = 0, 1
    state = cluster(report)
    report_to(state, event("a", "r", ANSWERING, output_tokens=0), 1.1)
    seen = state.view().instances["a"]
    assert (seen.running, seen.waiting) == (1, 0)
    assert seen.requests[0].phase is Phase.ANSWERING
    assert table_of(seen.requests).phase_load() == PhaseLoad(0, 1, float("inf"), quantum_tokens=500)


def test_counts_with_another_quantum_are_recomputed() -> None:
    reported = request("r", ANSWERING, output_tokens=400)
    reported.phase_tokens, reported.pacer_slack_tokens = 300, 2.0
    seen = cluster(steady("a", [reported])).view().instances["a"]
    assert Pascal(quantum_tokens=200).load_of(seen).fresh_answering == 0
    assert Pascal(quantum_tokens=500).load_of(seen).fresh_answering == 1
