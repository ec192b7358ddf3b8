"""CascadeInfer's decisions, one by one, and Llumnix's."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.actions import Action, Migrate, Offer, Place, SetStages
from tailrace.cluster import Arrival, ClusterView, InstanceState, InstanceView, Phase, RequestView, Stage
from tailrace.policy.cascade.layout import tiles
from tailrace.policy.cascade.llumnix import Llumnix, freeness
from tailrace.policy.cascade.policy import (
    Cascade,
    CascadeChain,
    CascadeInterStageOnly,
    CascadeNoPipeline,
    CascadeRoundRobin,
)
from tests.policy.fleets import MAX_LENGTH, cluster, fleets, instance, quick, request

POLICY = Cascade()
STAGES = (
    Stage(0, 1_000, ("a", "b")),
    Stage(1_000, 8_000, ("c", "d")),
    Stage(8_000, MAX_LENGTH, ("e",)),
)


def arrival(prompt: int, seq: int = 0, excluded: frozenset[str] = frozenset()) -> Arrival:
    return Arrival("new", prompt, 100, seq, excluded=excluded)


def held(where: str, *lengths: int) -> tuple[RequestView, ...]:
    return tuple(request(f"{where}{n}", where, length - 10, 10) for n, length in enumerate(lengths))


def staged(*changed: InstanceView) -> ClusterView:
    known = {name: instance(name) for name in "abcde"}
    known |= {i.instance_id: i for i in changed}
    return cluster(*known.values(), stages=STAGES)


# ---- arrival


@pytest.mark.parametrize(("prompt", "where"), [(999, "a"), (1_000, "c"), (7_999, "c"), (8_000, "e")])
def test_the_earliest_stage_that_covers(prompt: int, where: str) -> None:
    assert POLICY.place(staged(), arrival(prompt), 0.0) == Place(where)
    assert POLICY.place(staged(), arrival(10**6), 0.0) == Place("e")


def test_the_least_demand_within_it() -> None:
    assert POLICY.place(staged(instance("a", held("a", 5_000))), arrival(10), 0.0) == Place("b")


def test_a_stage_without_anybody_is_stood_in_for_by_a_longer_one() -> None:
    gone = [instance(name, state=InstanceState.SUSPECT) for name in "cd"]
    assert POLICY.place(staged(*gone), arrival(2_000), 0.0) == Place("e")
    assert POLICY.place(staged(*gone), arrival(2_000, excluded=frozenset("e")), 0.0) == Place("a")


def test_round_robin_within_the_stage() -> None:
    turns = [CascadeRoundRobin().place(staged(), arrival(10, seq), 0.0) for seq in range(3)]
    assert turns == [Place("a"), Place("b"), Place("a")]


# ---- boundary


def outgrown(length: int = 1_500) -> tuple[InstanceView, RequestView]:
    requests = held("a", length)
    return instance("a", requests), requests[0]


def test_hands_over_to_the_next_stage_by_bid() -> None:
    source, grown = outgrown()
    view = staged(source, instance("c", held("c", 5_000)))
    # All of the stage are asked, the one with the least demand first.
    assert list(POLICY.on_length_boundary(view, grown, 0.0)) == [
        Offer("a0", "a", ("d", "c"), "length boundary")
    ]
    (turned,) = CascadeRoundRobin().on_length_boundary(view, grown, 0.0)
    assert isinstance(turned, Migrate) and turned.target_id in "cd"


def test_hands_over_to_the_stage_that_covers_it_now() -> None:
    source, grown = outgrown(20_000)
    assert list(POLICY.on_length_boundary(staged(source), grown, 0.0)) == [
        Offer("a0", "a", ("e",), "length boundary")
    ]


@pytest.mark.parametrize("why", ["no room", "migrating", "draining"])
def test_else_it_goes_on_where_it_is(why: str) -> None:
    source, grown = outgrown()
    targets = [instance(name) for name in "cd"]
    match why:
        case "no room":
            targets = [instance(name, capacity=1_000) for name in "cd"]
        case "migrating":
            grown = replace(grown, migrating=True)
        case "draining":
            targets = [replace(i, state=InstanceState.DRAINING) for i in targets]
    assert list(POLICY.on_length_boundary(staged(source, *targets), grown, 0.0)) == []


@pytest.mark.parametrize("busy", ["source", "target"])
def test_transfers_under_way_keep_nothing_from_being_offered(busy: str) -> None:
    """Who waits for its turn is the protocol's matter; what is ordered outright goes within the limit."""
    source, grown = outgrown()
    targets = [instance(name) for name in "cd"]
    if busy == "source":
        source = replace(source, migrations_out=3)
    else:
        targets = [replace(i, migrations_in=3) for i in targets]
    view = staged(source, *targets)
    assert offers(POLICY.on_length_boundary(view, grown, 0.0))
    assert not CascadeRoundRobin().on_length_boundary(view, grown, 0.0)


def test_all_that_outgrew_their_stage_are_offered_at_once() -> None:
    """Not three a source, with the others waiting for the next refinement."""
    source = instance("a", held("a", *range(1_500, 1_520)))
    found = offers(POLICY.on_tick(ticked(staged(source), 4.0), 5.0))
    assert [offer.request_id for offer in found] == [f"a{n}" for n in reversed(range(20))]


def test_what_found_no_room_is_handed_over_at_the_next_refinement() -> None:
    source, _ = outgrown()
    assert not offers(POLICY.on_tick(ticked(staged(source), 2.0), 3.0))
    assert offers(POLICY.on_tick(ticked(staged(source), 4.0), 5.0))[0].request_id == "a0"


def ticked(view: ClusterView, last_tick_s: float | None) -> ClusterView:
    """As on_tick gets it: the previous one was then."""
    return replace(view, last_tick_s=last_tick_s)


@quick
@given(st.lists(st.floats(0.0, 0.9), min_size=1, max_size=120))
def test_a_late_tick_misses_no_period(lateness: list[float]) -> None:
    """Handovers that are due, once every five seconds, from ticks of a second of which each may be late."""
    source, _ = outgrown()
    last_s, worked = 0.0, 0
    for number, late_s in enumerate(lateness, start=1):
        now = number + late_s
        worked += bool(offers(POLICY.on_tick(ticked(staged(source), last_s), now)))
        last_s = now
    assert worked == int(last_s // 5.0)


def test_a_tick_that_missed_refinements_makes_up_for_them() -> None:
    """Two steps of the moving average in one are the two one after the other."""
    view = staged(instance("a", held("a", 100, 200, 300)), instance("c", held("c", 2_000, 2_500, 3_000)))
    (first,) = set_stages(POLICY.on_tick(ticked(view, 4.0), 5.0))
    (second,) = set_stages(POLICY.on_tick(ticked(replace_stages(view, first), 9.0), 10.0))
    (both,) = set_stages(POLICY.on_tick(ticked(view, 4.0), 10.0))
    ends = [[stage.hi for stage in action.stages] for action in (second, both)]
    assert ends[0] == pytest.approx(ends[1], abs=1)


def offers(actions: Iterable[Action]) -> list[Offer]:
    return [a for a in actions if isinstance(a, Offer)]


# ---- stages


def set_stages(actions: Iterable[Action]) -> list[SetStages]:
    return [a for a in actions if isinstance(a, SetStages)]


def crowded(count: int = 8) -> ClusterView:
    """Many short requests, few long ones."""
    return cluster(
        *(instance(f"w{n}", held(f"w{n}", *[200] * 30, 300, 9_000 + n, 20_000)) for n in range(count))
    )


def test_plans_once_there_is_something_to_plan_for() -> None:
    assert not set_stages(POLICY.on_tick(cluster(instance("w0"), instance("w1")), 1.0))
    (planned,) = set_stages(POLICY.on_tick(crowded(), 1.0))
    assert tiles(planned.stages, MAX_LENGTH)
    assert len(planned.stages) > 1
    assert not set_stages(POLICY.on_tick(ticked(replace_stages(crowded(), planned), 1.0), 2.0))


def replace_stages(view: ClusterView, action: SetStages) -> ClusterView:
    return ClusterView(view.instances, action.stages)


def test_plans_at_once_for_a_history() -> None:
    policy = Cascade(history=[(100, 100)] * 90 + [(20_000, 2_000)] * 10)
    (planned,) = set_stages(policy.on_tick(cluster(*(instance(f"w{n}") for n in range(8))), 1.0))
    assert len(planned.stages) > 1


def test_replans_when_it_pays() -> None:
    view = crowded()
    names = tuple(view.instances)
    one = SetStages((Stage(0, MAX_LENGTH, names),))
    (planned,) = set_stages(POLICY.on_tick(replace_stages(view, one), 60.0))
    assert len(planned.stages) > 1
    # Not off its time, and not for a plan that is hardly better.
    assert not set_stages(POLICY.on_tick(ticked(replace_stages(view, one), 60.0), 61.0))
    unmoved = Cascade(least_plan_gain=0.99)
    assert not set_stages(unmoved.on_tick(replace_stages(view, one), 60.0))


def test_layouts_of_the_baselines() -> None:
    (chained,) = set_stages(CascadeChain().on_tick(crowded(), 1.0))
    assert all(len(stage.instance_ids) == 1 for stage in chained.stages)
    (one,) = set_stages(CascadeNoPipeline().on_tick(crowded(), 1.0))
    assert len(one.stages) == 1


@settings(quick, max_examples=80)
@given(view=fleets(staged=True), ticks=st.lists(st.sampled_from([1.0, 5.0, 60.0]), max_size=5))
def test_stages_always_tile_the_lengths(view: ClusterView, ticks: list[float]) -> None:
    for now in ticks:
        for action in set_stages(POLICY.on_tick(view, now)):
            view = replace_stages(view, action)
        members = {n for n, i in view.instances.items() if i.state is not InstanceState.DRAINING}
        assert {name for stage in view.stages for name in stage.instance_ids} == members
        assert not members or tiles(view.stages, MAX_LENGTH)


# ---- rebalance


def test_an_overloaded_outlier_hands_to_its_peers() -> None:
    """Down to the mean, the longest first; no peer becomes an outlier by it."""
    view = cluster(
        instance("a", held("a", 4_000, 2_000, 500, 300)),
        instance("b", held("b", 800)),
        stages=(Stage(0, MAX_LENGTH, ("a", "b")),),
    )
    # The mean demand is 3,808 tokens, in blocks; nobody is to hold more than 1.25 of it.
    assert list(POLICY.on_tick(ticked(view, 0.5), 1.0)) == [
        Offer(f"a{n}", "a", ("b",), "overloaded", 4_760) for n in (1, 2, 3)
    ]
    assert not CascadeInterStageOnly().on_tick(ticked(view, 0.5), 1.0)


def test_what_is_under_way_from_an_outlier_counts_as_gone() -> None:
    view = cluster(
        instance("a", (*held("a", 4_000), request("gone", "a", 2_780, 10, migrating=True), *held("x", 16))),
        instance("b", held("b", 800)),
        stages=(Stage(0, MAX_LENGTH, ("a", "b")),),
    )
    assert demand(view.instances["a"]) == 6_816
    # Of the 3,008 tokens above the mean, 2,790 are leaving.
    assert [o.request_id for o in offers(POLICY.on_tick(ticked(view, 0.5), 1.0))] == ["x0"]


@quick
@given(fleets(staged=True), st.floats(1.0, 2.0))
def test_rebalance_stays_in_the_stage_and_makes_no_outliers(view: ClusterView, outlier: float) -> None:
    policy = Cascade(outlier=outlier)
    brought: dict[str, int] = {}
    for offer in offers(policy.on_tick(ticked(view, 0.5), 1.0)):
        assert offer.reason == "overloaded"
        stage = next(s for s in view.stages if offer.source_id in s.instance_ids)
        source = view.instances[offer.source_id]
        length = next(r.context_tokens for r in source.requests if r.request_id == offer.request_id)
        peers = [view.instances[name] for name in stage.instance_ids]
        peers = [i for i in peers if i.state is InstanceState.ACTIVE]
        mean = sum(map(demand, peers)) / len(peers)
        assert demand(source) > outlier * mean
        # Nobody who is asked may become an outlier by it; by the view the first of them does not.
        assert offer.most_tokens == math.floor(outlier * mean)
        assert set(offer.receiver_ids) < set(stage.instance_ids)
        first = offer.receiver_ids[0]
        brought[first] = brought.get(first, 0) + length
        assert demand(view.instances[first]) + brought[first] <= outlier * mean


def demand(instance: InstanceView) -> int:
    return instance.kv_used_tokens + instance.prefill_backlog_tokens


# ---- Llumnix


def test_llumnix_dispatches_to_the_freest() -> None:
    view = cluster(
        instance("a", held("a", 5_000)), instance("b", held("b", 5_000, 100)), instance("c", capacity=100)
    )
    assert Llumnix().place(view, arrival(10), 0.0) == Place("a")


def test_llumnix_pairs_the_fullest_with_the_emptiest() -> None:
    full = instance("a", held("a", 5_008, 1_008, 3_008), capacity=9_088)
    fuller = instance("b", held("b", 5_008, 2_000), capacity=7_008)
    view = cluster(full, fuller, instance("c"), instance("d", held("d", 100)))
    assert [*Llumnix().on_tick(view, 0.0)] == [
        Migrate("b1", "b", "c", "load"),
        Migrate("a1", "a", "d", "load"),
    ]


@quick
@given(fleets())
def test_llumnix_only_relieves_the_full_and_never_fills_the_free(view: ClusterView) -> None:
    policy = Llumnix()
    moves: list[Action] = [*policy.on_tick(view, 0.0)]
    for move in moves:
        assert isinstance(move, Migrate)
        source, target = view.instances[move.source_id], view.instances[move.target_id]
        moved = next(r for r in source.requests if r.request_id == move.request_id)
        assert moved.phase is not Phase.PREFILL
        assert freeness(source) < policy.migrate_below
        assert freeness(target, moved.context_tokens, 1) >= policy.migrate_below
