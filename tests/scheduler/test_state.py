"""The state of the cluster from membership, reports and placements."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from tailrace.actions import Place
from tailrace.cluster import Arrival, InstanceState, Phase, PhaseLoad, Pool
from tailrace.control.events import (
    Arrived,
    MigrationClosed,
    MigrationOpened,
    PoolOrdered,
    PoolSettled,
    ReportsStopped,
    Ticked,
)
from tailrace.control.reported_cluster import ReportedCluster
from tailrace.policy.least_loaded import LeastLoaded
from tailrace.policy.requests import table_of
from tests.scheduler.facts import (
    ANSWERING,
    GONE,
    PREFILL,
    REASONING,
    event,
    instance,
    members,
    report_to,
    request,
    set_members,
    steady,
)


def cluster(*names: str) -> ReportedCluster:
    """Return a state of these instances, all of which have reported."""
    state = ReportedCluster()
    set_members(state, members(*names), 0.0)
    for name in names:
        report_to(state, steady(name), 0.0)
    return state


def arrival(request_id: str, prompt_tokens: int = 100) -> Arrival:
    """Return a new request."""
    return Arrival(request_id, prompt_tokens, 1_000, 0)


def test_a_report_updates_the_view() -> None:
    state = cluster("a", "b")
    report_to(state, steady("a", [request("r", output_tokens=28)]), 1.0)
    view = state.view().instances["a"]
    assert (view.running, view.kv_used_tokens, view.kv_capacity_tokens) == (1, 128, 16_000)
    assert view.requests[0].context_tokens == 128
    assert view.requests[0].phase is Phase.REASONING
    assert list(state.view().instances) == ["a", "b"]


def test_views_are_immutable() -> None:
    state = cluster("a")
    before = state.view()
    report_to(state, steady("a", [request("r")]), 1.0)
    set_members(state, members("a", "b"), 1.0)
    assert before.instances["a"].running == 0
    assert list(before.instances) == ["a"]


def test_a_change_of_pools_and_states_renews_the_instances_concerned_alone() -> None:
    state, known = cluster("a", "b", "c", "d"), members("a", "b", "c", "d")
    before, of_model = state.view(), state.view_for_request("a", 0.0)
    known.pools, known.draining, known.suspects = {"a": Pool.PREFILL}, frozenset("b"), frozenset("c")
    set_members(state, known, 1.0)
    for view in (state.view(), state.view_for_request("a", 1.0)):
        shown = [(i.pool, i.state) for i in view.instances.values()]
        active = InstanceState.ACTIVE
        changed = [(None, InstanceState.DRAINING), (None, InstanceState.SUSPECT)]
        assert shown == [(Pool.PREFILL, active), *changed, (None, active)]
        assert view.instances["d"] is before.instances["d"]
    set_members(state, members("a", "b", "c", "d"), 2.0)
    assert state.view().instances == before.instances
    assert state.view_for_request("a", 2.0).instances == of_model.instances
    # An order that etcd confirms shows no other pool in between.
    state.apply(PoolOrdered("d", Pool.DECODE))
    assert state.view().instances["d"].pool is Pool.DECODE
    known = members("a", "b", "c", "d")
    known.pools = {"d": Pool.DECODE}
    set_members(state, known, 3.0)
    assert state.view().instances["d"].pool is Pool.DECODE
    state.apply(PoolSettled("d"))
    assert state.view().instances["d"].pool is Pool.DECODE


def test_reports_of_unknown_and_earlier_incarnations_are_ignored() -> None:
    state = cluster("a")
    report_to(state, steady("x", [request("r")]), 1.0)
    report_to(state, steady("a", [request("r")], incarnation="0"), 1.0)
    assert list(state.requests()) == []


def test_a_restarted_instance_starts_empty() -> None:
    state = cluster("a")
    report_to(state, steady("a", [request("r")]), 1.0)
    restarted = members("a")
    restarted.instances = {"a": instance("a", incarnation="2")}
    set_members(state, restarted, 2.0)
    assert list(state.requests()) == []
    assert state.view().instances["a"].running == 0


def test_a_burst_is_distributed() -> None:
    """Placements count although there is no report between them."""
    names = [f"w{n}" for n in range(10)]
    state, policy, placed = cluster(*names), LeastLoaded(), Counter[str]()
    for number in range(100):
        new = arrival(f"r{number}")
        placement = policy.place(state.view(), new, 0.0)
        assert isinstance(placement, Place)
        state.place(new, placement.instance_id, 0.0)
        placed[placement.instance_id] += 1
    assert set(placed.values()) == {10}


def test_a_reported_placement_is_not_counted_twice() -> None:
    state = cluster("a")
    state.place(arrival("r"), "a", 1.0)
    assert state.view().instances["a"].prefill_backlog_tokens == 100
    assert state.view().instances["a"].waiting == 1
    report_to(state, steady("a", [request("r")]), 1.5)
    view = state.view().instances["a"]
    assert (view.prefill_backlog_tokens, view.waiting, view.running) == (0, 0, 1)
    assert len(view.requests) == 1


def test_a_placement_that_is_never_reported_is_dropped() -> None:
    state = cluster("a")
    state.place(arrival("r"), "a", 1.0)
    report_to(state, steady("a"), 1.5)
    assert state.view().instances["a"].waiting == 1
    report_to(state, steady("a"), 3.5)
    assert state.view().instances["a"].waiting == 0
    assert state.request("r") is None


@pytest.mark.parametrize("events", [Arrived, Ticked])
def test_placements_are_forgotten_while_no_report_comes(events: type[Arrived | Ticked]) -> None:
    def at(now_s: float) -> Arrived | Ticked:
        return Ticked(now_s, 0.0) if events is Ticked else Arrived(arrival("other"), now_s, 0.0)

    state = cluster("a", "b")
    state.place(arrival("early"), "a", 1.0)
    state.place(arrival("again"), "a", 1.0)
    state.place(arrival("again"), "b", 3.0)
    state.apply(at(4.5))
    assert [state.view().instances[name].waiting for name in ("a", "b")] == [1, 1]
    state.apply(at(5.5))
    assert [state.view().instances[name].waiting for name in ("a", "b")] == [0, 1]
    assert state.request("early") is None and state.request("again") is not None
    state.apply(at(7.5))
    assert state.view().instances["b"].waiting == 0 and not state._locations
    # It runs after all.
    report_to(state, steady("a", [request("early")]), 8.0)
    assert state.view().instances["a"].running == 1


def test_a_cluster_of_which_no_report_comes_is_out_of_date() -> None:
    assert ReportedCluster().is_out_of_date(0.0)
    state = cluster("a", "b")
    assert not state.is_out_of_date(4.0) and state.is_out_of_date(4.5)
    # Placements and membership are no reports.
    state.place(arrival("r"), "a", 4.2)
    set_members(state, members("a"), 4.3)
    assert state.is_out_of_date(4.5)
    report_to(state, steady("a"), 5.0)
    assert not state.is_out_of_date(8.5)
    restored = ReportedCluster()
    restored.restore(*state.state(), now_s=8.0)
    assert not restored.is_out_of_date(8.5) and restored.is_out_of_date(9.5)


def test_a_request_placed_again_moves() -> None:
    state = cluster("a", "b")
    state.place(arrival("r"), "a", 1.0)
    state.place(arrival("r"), "b", 1.1)
    assert state.view().instances["a"].waiting == 0
    found = state.request("r")
    assert found is not None and found.instance_id == "b"


def test_events_update_counts_between_reports() -> None:
    state = cluster("a")
    state.place(arrival("r"), "a", 1.0)
    (change,) = report_to(state, event("a", "r", REASONING), 1.1)
    assert (change.left, change.request.phase) == (Phase.PREFILL, Phase.REASONING)
    assert change.request.max_tokens == 1_000
    view = state.view().instances["a"]
    assert (view.running, view.waiting, view.prefill_backlog_tokens) == (1, 0, 0)
    (change,) = report_to(state, event("a", "r", ANSWERING, output_tokens=50), 1.2)
    assert (change.left, change.request.output_tokens) == (Phase.REASONING, 50)
    assert report_to(state, event("a", "r", GONE), 1.3) == []
    view = state.view().instances["a"]
    assert (view.running, view.kv_used_tokens, view.context_tokens, view.requests) == (0, 0, 0, ())


def test_the_next_report_compensates_a_lost_event() -> None:
    state = cluster("a")
    state.place(arrival("r"), "a", 1.0)
    (change,) = report_to(state, steady("a", [request("r", REASONING)]), 1.5)
    assert change.left is Phase.PREFILL
    assert report_to(state, steady("a", [request("r", REASONING)]), 2.0) == []


def test_requests_from_before_this_scheduler_are_no_phase_change() -> None:
    state = cluster("a")
    assert report_to(state, steady("a", [request("r", ANSWERING)]), 1.0) == []


def test_phase_changes_of_requests_placed_by_another_scheduler() -> None:
    state = cluster("a")
    (change,) = report_to(state, event("a", "r1", REASONING), 1.0)
    assert change.left is Phase.PREFILL
    (change,) = report_to(state, event("a", "r2", ANSWERING, output_tokens=1), 1.0)
    assert change.left is Phase.PREFILL
    (change,) = report_to(state, event("a", "r3", ANSWERING, output_tokens=40), 1.0)
    assert change.left is Phase.REASONING


def test_a_migrated_request_counts_where_its_epoch_is_newest() -> None:
    state = cluster("a", "b")
    report_to(state, steady("a", [request("r")]), 1.0)
    assert report_to(state, event("b", "r", REASONING, epoch=1, output_tokens=12), 1.1) == []
    found = state.request("r")
    assert found is not None and (found.instance_id, found.epoch) == ("b", 1)
    # The source still reports it.
    assert report_to(state, steady("a", [request("r")]), 1.2) == []
    found = state.request("r")
    assert found is not None and found.instance_id == "b"
    assert state.requests_on("a") == []
    report_to(state, event("a", "r", GONE), 1.3)
    assert state.request("r") is not None
    assert len(list(state.requests())) == 1


def test_a_recovered_request_counts_on_its_new_instance() -> None:
    state = cluster("a", "b")
    report_to(state, steady("a", [request("r", REASONING)]), 1.0)
    state.place(replace(arrival("r"), output_tokens=10), "b", 1.1)
    # A late event of the lost instance.
    assert report_to(state, event("a", "r", ANSWERING, output_tokens=11), 1.2) == []
    found = state.request("r")
    assert found is not None and found.instance_id == "b"
    (change,) = report_to(state, event("b", "r", REASONING, epoch=1, output_tokens=11), 1.3)
    assert change.left is Phase.PREFILL


def test_instance_states() -> None:
    state = cluster("a", "b", "c", "d")
    facts = members("a", "b", "c", "d")
    facts.draining, facts.suspects = frozenset("b"), frozenset("c")
    facts.pools = {"a": Pool.PREFILL}
    set_members(state, facts, 1.0)
    state.apply(ReportsStopped(["d"]))
    states = {name: i.state for name, i in state.view().instances.items()}
    assert states == {
        "a": InstanceState.ACTIVE,
        "b": InstanceState.DRAINING,
        "c": InstanceState.SUSPECT,
        "d": InstanceState.SUSPECT,
    }
    assert state.view().instances["a"].pool is Pool.PREFILL


def test_if_all_instances_are_silent_none_is_suspect() -> None:
    state = cluster("a", "b")
    state.apply(ReportsStopped(["a", "b"]))
    assert len(state.view().placeable()) == 2


def test_an_instance_that_stops_reporting_renews_only_its_own_view() -> None:
    state = cluster("a", "b", "c")
    state.apply(ReportsStopped(["b"]))
    before = dict(state.view().instances)
    state.apply(ReportsStopped(["c"]))
    view = state.view()
    assert [view.instances[name].state is InstanceState.ACTIVE for name in "abc"] == [True, True, False]
    assert view.instances["a"] is before["a"]
    state.apply(ReportsStopped(["c"]))
    assert state.view() is view


def test_one_open_migration_per_request() -> None:
    state = cluster("a")
    report_to(state, steady("a", [request("r")]), 1.0)
    moving = state.request("r")
    assert moving is not None
    assert state.order(MigrationOpened(moving, None))
    assert not state.order(MigrationOpened(moving, None))
    assert state.view().instances["a"].requests[0].migrating
    report_to(state, steady("a", [request("r")]), 1.5)
    assert state.view().instances["a"].requests[0].migrating
    state.apply(MigrationClosed("r"))
    assert not state.view().instances["a"].requests[0].migrating


def test_requests_of_a_removed_instance_are_dropped() -> None:
    state = cluster("a", "b")
    report_to(state, steady("a", [request("r", PREFILL)]), 1.0)
    set_members(state, members("b"), 2.0)
    assert state.request("r") is None
    assert list(state.view().instances) == ["b"]


def test_an_incoming_migration_reserves_room_until_reported() -> None:
    state = cluster("a", "b")
    report_to(state, steady("a", [request("r", output_tokens=20)]), 1.0)
    moving = state.request("r")
    assert moving is not None
    assert state.order(MigrationOpened(moving, "b"))
    source, target = (state.view().instances[name] for name in "ab")
    # 120 tokens, in blocks, plus a block for growth.
    assert (target.kv_used_tokens, target.migrations_in, source.migrations_out) == (144, 1, 1)
    report = steady("b")
    report.load.migrations_in, report.load.kv_blocks_used = 1, 9
    report_to(state, report, 1.5)
    assert state.view().instances["b"].kv_used_tokens == 144
    report_to(state, event("b", "r", ANSWERING, epoch=1, output_tokens=30), 1.6)
    state.apply(MigrationClosed("r"))
    assert state.view().instances["b"].kv_used_tokens == 144
    report_to(state, steady("b", [request("r", ANSWERING, epoch=1, output_tokens=30)]), 2.0)
    target = state.view().instances["b"]
    assert (target.kv_used_tokens, target.migrations_in) == (144, 0)


def test_incoming_context_counts_until_the_request_arrives() -> None:
    state = cluster("a", "b")
    report_to(state, steady("a", [request("r", output_tokens=20)]), 1.0)
    moving = state.request("r")
    assert moving is not None and state.order(MigrationOpened(moving, "b"))
    target = state.view().instances["b"]
    assert (target.context_tokens, target.coming_tokens) == (0, moving.context_tokens)
    # It ends with the request's arrival, even while the migration is open, not with a report.
    report_to(state, steady("b"), 1.5)
    assert state.view().instances["b"].coming_tokens == moving.context_tokens
    report_to(state, event("b", "r", ANSWERING, epoch=1, output_tokens=30), 1.6)
    target = state.view().instances["b"]
    assert (target.context_tokens, target.coming_tokens) == (moving.prompt_tokens + 30, 0)
    state.apply(MigrationClosed("r"))
    assert state.view().instances["b"].coming_tokens == 0


def test_an_abandoned_migration_frees_the_room() -> None:
    state = cluster("a", "b")
    report_to(state, steady("a", [request("r")]), 1.0)
    moving = state.request("r")
    assert moving is not None and state.order(MigrationOpened(moving, "b"))
    state.apply(MigrationClosed("r"))
    source, target = (state.view().instances[name] for name in "ab")
    assert (target.kv_used_tokens, target.migrations_in, source.migrations_out) == (0, 0, 0)


def test_views_contain_all_reported_values() -> None:
    state = cluster("a")
    reported = request("r", ANSWERING, output_tokens=50)
    reported.phase_tokens, reported.pacer_slack_tokens, reported.predicted_remaining_tokens = 40, -3.5, 200.0
    reported.traceparent = "00-1-2-01"
    reported.host_kv_blocks = 3
    report = steady("a", [reported, request("q", REASONING)])
    load = report.load
    load.host_kv_bytes_used, load.host_kv_bytes_total = 800, 8_000
    load.prefill_delay_s, load.max_running_tokens = 0.5, 9_000
    load.prefill_base_s, load.prefill_s_per_token, load.prefill_s_per_token_squared = 0.01, 1e-3, 1e-6
    load.future_load.extend([260.0, 100.0])
    load.migration_bytes_per_s = 40_000.0
    report_to(state, report, 1.0)
    state.place(arrival("p"), "a", 1.1)
    seen = state.view().instances["a"]
    assert table_of(seen.requests).phase_load() == PhaseLoad(2, 1, -3.5, quantum_tokens=500)
    assert (seen.host_kv_tokens, seen.host_kv_capacity_tokens) == (100, 1_000)
    placed = arrival("p").prompt_tokens
    assert seen.prefill_delay_s == pytest.approx(0.51 + placed * 1e-3 + placed**2 * 1e-6)
    assert (seen.max_running_tokens, seen.future_load) == (9_000, (260.0, 100.0))
    assert seen.migration_tokens_per_s == 5_000.0
    assert state.traceparent("r") == "00-1-2-01" and state.traceparent("q") == ""
    answering = state.request("r")
    assert answering is not None and answering.predicted_remaining_tokens == 200.0
    assert (answering.phase_tokens, answering.host_kv_tokens) == (40, 48)


def test_phase_events_contain_predictions() -> None:
    """The dispatch to decode is decided on the event, before any report contains the request."""
    state = cluster("a")
    state.place(arrival("r"), "a", 1.0)
    (change,) = report_to(state, event("a", "r", REASONING, predicted=600.0), 1.1)
    assert change.request.predicted_remaining_tokens == 600.0
    (seen,) = state.view().instances["a"].requests
    assert seen.predicted_remaining_tokens == 600.0
    # Without a new prediction, the previous one counts down.
    (change,) = report_to(state, event("a", "r", ANSWERING, output_tokens=51), 1.2)
    assert change.request.predicted_remaining_tokens == 550.0
    report_to(state, event("a", "r", ANSWERING, output_tokens=61, predicted=20.0), 1.3)
    (seen,) = state.view().instances["a"].requests
    assert seen.predicted_remaining_tokens == 20.0


def test_predictions_never_exceed_the_length_limits() -> None:
    """The limits are max_tokens, 1,000, and the instance's maximum context, 4,096 tokens."""
    state = cluster("a")
    reported = request("r", output_tokens=900)
    reported.predicted_remaining_tokens = 8_000.0
    long = request("q", prompt_tokens=3_500, output_tokens=10)
    long.predicted_remaining_tokens = 8_000.0
    report_to(state, steady("a", [reported, long]), 1.0)
    predicted = {r.request_id: r.predicted_remaining_tokens for r in state.view().instances["a"].requests}
    assert predicted == {"r": 100.0, "q": 4_096.0 - 3_510.0}
    report_to(state, event("a", "new", REASONING, predicted=8_000.0), 1.1)
    found = state.request("new")
    assert found is not None and found.predicted_remaining_tokens == 4_096.0 - 101.0


def test_unreported_placements_are_bounded() -> None:
    state = cluster("a")
    # The monitor is down, so nothing is known of them.
    for number in range(5_000):
        state.place(arrival(f"r{number}"), "a", 0.0)
    assert len(state.requests_on("a")) == 1_024 == len(state._locations)
    # It returns, and one of the dropped requests is running.
    report_to(state, steady("a", [request("r0")]), 10.0)
    assert [r.request_id for r in state.requests()] == ["r0"]
    assert list(state._locations) == ["r0"]
