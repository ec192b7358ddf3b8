"""A request is placed, migrated and offered only among instances of its model."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.actuator import WorkerCalls
from scheduler_svc.admin.errors import AdminError
from tailrace.actions import Offer, Place
from tailrace.cluster import Arrival, Stage
from tailrace.control.cluster_model import ModelGroups
from tailrace.control.events import ReportsStopped
from tailrace.control.reported_cluster import ReportedCluster
from tailrace.model_identity import ModelIdentity
from tailrace.policy.pulling import most_cached
from tailrace.policy.registry import load
from tailrace.records import InstanceRecord, PolicyRecord
from tailrace.service.channels import Channels
from tailrace.slo import Slo
from tailrace.v1 import cache_pb2
from tests.scheduler.facts import (
    REASONING,
    event,
    instance,
    report_to,
    request,
    set_members,
    steady,
)
from tests.scheduler.test_decisions import Scheduler
from tests.static_members import StaticMembers

FIRST, SECOND = ModelIdentity("t", "first", "bf16"), ModelIdentity("t", "second", "bf16")


def with_model(name: str, identity: ModelIdentity) -> InstanceRecord:
    """Return an instance of this model; instances of one identity can exchange KV."""
    return msgspec.structs.replace(instance(name), model_identity=identity, model_fingerprint=identity.key)


def two_models() -> StaticMembers:
    """Return two instances of each model, in two stages."""
    records = [
        with_model("a", FIRST),
        with_model("b", SECOND),
        with_model("c", FIRST),
        with_model("d", SECOND),
    ]
    return StaticMembers(
        instances={record.instance_id: record for record in records},
        stages=(Stage(0, 120, ("a", "b")), Stage(120, 4096, ("c", "d"))),
    )


def incoming(request_id: str, model: str, excluded: frozenset[str] = frozenset()) -> Arrival:
    """Return a request for this model."""
    return Arrival(request_id, 10, 10, excluded=excluded, model=model, frontend_id="f")


@pytest.fixture
def state() -> ReportedCluster:
    """Return a state with both models."""
    state = ReportedCluster()
    set_members(state, two_models(), 0.0)
    return state


def test_a_view_of_a_model_has_only_its_instances(state: ReportedCluster) -> None:
    assert list(state.view_for_arrival("t:first", 0.0).instances) == ["a", "c"]
    second = state.view_for_arrival("t:second:bf16", 0.0)
    assert [stage.instance_ids for stage in second.stages] == [("b",), ("d",)]
    assert list(state.view_for_arrival("t:third", 0.0).instances) == []
    for every in ("", "t"):
        assert state.view_for_arrival(every, 0.0) is state.view()
    assert list(state.view_for_request("d", 0.0).instances) == ["b", "d"]
    assert not state.can_exchange_kv("a", "b")


def test_a_view_of_a_model_is_updated_by_reports(state: ReportedCluster) -> None:
    before = state.view_for_arrival("t:first", 0.0)
    assert state.view_for_arrival("t:first", 0.0) is before
    report_to(state, steady("a", [request("r")]), 1.0)
    assert state.view_for_arrival("t:first", 0.0).instances["a"].running == 1
    assert before.instances["a"].running == 0


@pytest.mark.parametrize(("model", "names"), [("t:first", {"a", "c"}), ("t:second", {"b", "d"})])
def test_requests_of_a_model_are_placed_on_its_instances(model: str, names: set[str]) -> None:
    scheduler = Scheduler()
    set_members(scheduler.state, two_models(), 0.0)
    scheduler.active.follow(PolicyRecord(name="round_robin"), Slo())
    placed = [scheduler.loop.place(incoming(f"r{n}", model)) for n in range(4)]
    assert {decision.instance_id for decision in placed} == names
    nowhere = scheduler.loop.place(incoming("r", model, frozenset(names)))
    assert (nowhere.instance_id, nowhere.refusal) == ("", "no active instance")


def test_a_placement_on_another_model_is_replaced() -> None:
    scheduler = Scheduler()
    set_members(scheduler.state, two_models(), 0.0)
    assert scheduler.policy.choice == "a"
    assert scheduler.loop.place(incoming("r", "t:second")).instance_id in {"b", "d"}


@pytest.mark.parametrize(("holder", "pulled"), [("c", "c"), ("b", "")])
def test_a_prefix_is_pulled_only_from_the_same_model(holder: str, pulled: str) -> None:
    """Blocks are named by their tokens, so both models use the same names."""
    scheduler = Scheduler()
    set_members(scheduler.state, two_models(), 0.0)
    scheduler.policy.pull_from = holder
    # Any model may answer, as with two precisions of one model.
    assert scheduler.loop.place(incoming("r", "")).pull_from_instance_id == pulled


def test_prefixes_of_other_models_are_ignored(state: ReportedCluster) -> None:
    for name in "abcd":
        report = steady(name)
        report.cache.seq = 1
        report.cache.changes.add(tier=cache_pb2.CACHE_TIER_DEVICE, stored=[11])
        report_to(state, report, 0.0)
    cached = state.cache.of_arrival([11], 16, 100, 0.0)
    assert set(cached) == {"a", "b", "c", "d"}
    arrival = Arrival("r", 100, 10, 0, cached=cached)
    view = state.view_for_arrival("t:second", 0.0)
    assert most_cached(arrival, tuple(view.instances.values())) == "b"


def test_a_policy_sees_only_instances_a_request_can_migrate_to() -> None:
    scheduler = Scheduler()
    set_members(scheduler.state, two_models(), 0.0)
    scheduler.place()
    scheduler.loop.handle_report(event("a", "r", REASONING), 1.0)
    assert [list(view.instances) for view in scheduler.policy.seen] == [["a", "c"]]


async def test_a_request_is_offered_only_to_instances_of_its_model(state: ReportedCluster) -> None:
    channels = Channels()
    workers = WorkerCalls(state, channels)
    report_to(state, steady("a", [request("r")]), 1.0)
    moving = state.request("r")
    assert moving is not None
    with pytest.raises(AdminError, match="no instance to offer"):
        await workers.offer(moving, Offer("r", "a", ("b", "d"), "load"), "cascade")
    await channels.close()


def test_groups_are_cached_in_a_bounded_number() -> None:
    groups = ModelGroups({name: with_model(name, FIRST) for name in "ab"})
    first = groups.running("t:first")
    assert first == {"a", "b"}
    assert groups.running("t:first") is first
    # Requests for unknown models must not fill the memory.
    for number in range(1_000):
        assert groups.running(f"no such model {number}") == frozenset()
    assert groups.running("t:first") is first
    assert len(groups._by_model) == 256


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["report", "arrive", "arrive", "silence", "join"]),
        st.sampled_from("abcd"),
        st.integers(0, 4),
    ),
    max_size=12,
)


@pytest.mark.parametrize("policy", ["pascal", "tailrace"])
@given(steps=STEPS)
def test_what_a_policy_kept_of_another_view_affects_no_placement(
    policy: str, steps: list[tuple[str, str, int]]
) -> None:
    state, used = ReportedCluster(), load(policy)
    present = two_models()
    set_members(state, present, 0.0)
    for number, (step, name, count) in enumerate(steps):
        if step == "report":
            report_to(state, steady(name, [request(f"{name}{n}") for n in range(count)]), 0.0)
        elif step == "silence":
            state.apply(ReportsStopped([name] if count else []))
        elif step == "join":
            joined = {**present.instances, f"{name}2": with_model(f"{name}2", FIRST if count else SECOND)}
            present = StaticMembers(instances=joined)
            set_members(state, present, 0.0)
        else:
            view = state.view_for_arrival((FIRST if count % 2 else SECOND).key if count < 4 else "", 0.0)
            arrival = Arrival(f"new-{number}", 100, 1_000, number)
            placement = used.place(view, arrival, 1.0)
            assert placement == load(policy).place(view, arrival, 1.0)
            if isinstance(placement, Place):
                state.place(arrival, placement.instance_id, 0.0)
