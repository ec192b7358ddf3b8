"""The individual decisions of CascadeInfer and Llumnix."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.actions import Action, Migrate, Offer, Place, ReturnPrompts, SetStages
from tailrace.cluster import (
    Arrival,
    ClusterView,
    InstanceState,
    InstanceView,
    Phase,
    RequestState,
    RequestView,
    Stage,
)
from tailrace.lengths import LengthStatistics
from tailrace.perf.length_penalty import load_length_penalty
from tailrace.policy.cascade.layout import stage_of, tiles
from tailrace.policy.cascade.llumnix import Llumnix, freeness
from tailrace.policy.cascade.policy import CHAIN, ONE_STAGE, ROUND_ROBIN, Cascade
from tests.policy.fleets import MAX_LENGTH, cluster, fleets, instance, quick, request

POLICY = Cascade()
IN_TURN = Cascade(handover=ROUND_ROBIN, rebalance=False)
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
def test_an_arrival_goes_to_the_earliest_stage_that_covers_it(prompt: int, where: str) -> None:
    assert POLICY.place(staged(), arrival(prompt), 0.0) == Place(where)
    assert POLICY.place(staged(), arrival(10**6), 0.0) == Place("e")


def full(name: str) -> InstanceView:
    """Return an instance whose batch has no slot left."""
    return replace(instance(name, held(name, 50, 50)), max_num_seqs=2)


@pytest.mark.parametrize(
    ("without_slot", "where"),
    [("", "a"), ("a", "b"), ("ab", "c"), ("abcd", "e"), ("abcde", "a"), ("cd", "a")],
)
def test_with_overflow_a_full_stage_passes_arrivals_on(without_slot: str, where: str) -> None:
    view = staged(*map(full, without_slot))
    assert Cascade(overflow=True).place(view, arrival(500), 0.0) == Place(where)
    # The paper's rule.
    assert POLICY.place(view, arrival(500), 0.0) == Place("b" if without_slot == "a" else "a")


def test_the_length_of_a_resumed_request_includes_its_output() -> None:
    lost = replace(arrival(900), output_tokens=100)
    assert POLICY.place(staged(), lost, 0.0) == Place("c")
    assert POLICY.place(staged(), replace(lost, output_tokens=99), 0.0) == Place("a")


def test_within_a_stage_the_least_demand_is_chosen() -> None:
    assert POLICY.place(staged(instance("a", held("a", 5_000))), arrival(10), 0.0) == Place("b")


def test_demand_is_relative_to_capacity_and_near_ties_go_to_fewer_requests() -> None:
    def loaded(name: str, tokens: int, capacity: int, requests: int) -> InstanceView:
        held = tuple(request(f"{name}{n}", name, tokens // requests, 1) for n in range(requests))
        return replace(instance(name, held, capacity=capacity), kv_used_tokens=tokens)

    # A fifth of a small capacity compared with a tenth of a large one.
    small, large = loaded("a", 20_000, 100_000, 1), loaded("b", 40_000, 400_000, 2)
    assert Cascade().place(cluster(small, large), arrival(100), 0.0) == Place("b")
    # A difference of less than a thousandth counts less than one more request.
    fewer, more = loaded("a", 40_100, 400_000, 2), loaded("b", 40_000, 400_000, 3)
    assert Cascade().place(cluster(fewer, more), arrival(100), 0.0) == Place("a")
    fuller = loaded("a", 40_400, 400_000, 2)
    assert Cascade().place(cluster(fuller, more), arrival(100), 0.0) == Place("b")


def test_a_stage_without_instances_is_replaced_by_a_longer_one() -> None:
    gone = [instance(name, state=InstanceState.SUSPECT) for name in "cd"]
    assert POLICY.place(staged(*gone), arrival(2_000), 0.0) == Place("e")
    assert POLICY.place(staged(*gone), arrival(2_000, excluded=frozenset("e")), 0.0) == Place("a")


def test_round_robin_within_the_stage() -> None:
    turns = [IN_TURN.place(staged(), arrival(10, seq), 0.0) for seq in range(3)]
    assert turns == [Place("a"), Place("b"), Place("a")]


# ---- boundary


def source_with_outgrown(length: int = 1_500) -> tuple[InstanceView, RequestView]:
    requests = held("a", length)
    return instance("a", requests), requests[0]


def test_an_outgrown_request_is_offered_to_the_next_stage() -> None:
    source, outgrown = source_with_outgrown()
    view = staged(source, instance("c", held("c", 5_000)))
    # All instances of the stage are asked, the one with the least demand first.
    assert list(POLICY.on_length_boundary(view, outgrown, 0.0)) == [
        Offer("a0", "a", ("d", "c"), "length boundary")
    ]
    (turned,) = IN_TURN.on_length_boundary(view, outgrown, 0.0)
    assert isinstance(turned, Migrate) and turned.target_id in "cd"


def test_an_outgrown_request_is_offered_to_the_stage_of_its_present_length() -> None:
    source, outgrown = source_with_outgrown(20_000)
    assert list(POLICY.on_length_boundary(staged(source), outgrown, 0.0)) == [
        Offer("a0", "a", ("e",), "length boundary")
    ]


@pytest.mark.parametrize("why", ["no room", "migrating", "draining"])
def test_an_outgrown_request_stays_if_no_handover_is_possible(why: str) -> None:
    source, outgrown = source_with_outgrown()
    targets = [instance(name) for name in "cd"]
    match why:
        case "no room":
            targets = [instance(name, capacity=1_000) for name in "cd"]
        case "migrating":
            outgrown = replace(outgrown, migrating=True)
        case "draining":
            targets = [replace(i, state=InstanceState.DRAINING) for i in targets]
    assert list(POLICY.on_length_boundary(staged(source, *targets), outgrown, 0.0)) == []


@pytest.mark.parametrize("busy", ["source", "target"])
def test_ongoing_transfers_prevent_migrations_but_no_offers(busy: str) -> None:
    """The protocol queues offers itself; direct migrations are subject to the limit."""
    source, outgrown = source_with_outgrown()
    targets = [instance(name) for name in "cd"]
    if busy == "source":
        source = replace(source, migrations_out=3)
    else:
        targets = [replace(i, migrations_in=3) for i in targets]
    view = staged(source, *targets)
    assert offers(POLICY.on_length_boundary(view, outgrown, 0.0))
    assert not IN_TURN.on_length_boundary(view, outgrown, 0.0)


def test_all_outgrown_requests_are_offered_at_once() -> None:
    """There is no limit per source that makes the others wait for the next refinement."""
    source = instance("a", held("a", *range(1_500, 1_520)))
    found = offers(POLICY.on_tick(with_last_tick(staged(source), 4.0), 5.0))
    assert [offer.request_id for offer in found] == [f"a{n}" for n in reversed(range(20))]


def test_missed_handovers_are_retried_at_the_next_refinement() -> None:
    source, _ = source_with_outgrown()
    assert not offers(POLICY.on_tick(with_last_tick(staged(source), 2.0), 3.0))
    assert offers(POLICY.on_tick(with_last_tick(staged(source), 4.0), 5.0))[0].request_id == "a0"


def with_last_tick(view: ClusterView, last_tick_s: float | None) -> ClusterView:
    """Return the view as `on_tick` gets it after a previous tick at that time."""
    return replace(view, last_tick_s=last_tick_s)


@quick
@given(st.lists(st.floats(0.0, 0.9), min_size=1, max_size=120))
def test_a_late_tick_misses_no_period(lateness: list[float]) -> None:
    """Handovers are due every five seconds; ticks come every second, each possibly late."""
    source, _ = source_with_outgrown()
    last_s, worked = 0.0, 0
    for number, late_s in enumerate(lateness, start=1):
        now = number + late_s
        worked += bool(offers(POLICY.on_tick(with_last_tick(staged(source), last_s), now)))
        last_s = now
    assert worked == int(last_s // 5.0)


def test_a_tick_catches_up_on_missed_refinements() -> None:
    """Two steps of the moving average at once equal two consecutive ones."""
    view = staged(instance("a", held("a", 100, 200, 300)), instance("c", held("c", 2_000, 2_500, 3_000)))
    (first,) = set_stages(POLICY.on_tick(with_last_tick(view, 4.0), 5.0))
    (second,) = set_stages(POLICY.on_tick(with_last_tick(replace(view, stages=first.stages), 9.0), 10.0))
    (both,) = set_stages(POLICY.on_tick(with_last_tick(view, 4.0), 10.0))
    ends = [[stage.hi for stage in action.stages] for action in (second, both)]
    assert ends[0] == pytest.approx(ends[1], abs=1)


@pytest.mark.parametrize(("now_s", "share"), [(5.0, 0.2), (10.0, 0.36)])
def test_a_refinement_moves_a_boundary_by_the_smoothing_factor(now_s: float, share: float) -> None:
    """It moves by a fifth, and by a fifth of the rest for the missed refinement."""
    view = staged(instance("a", held("a", 100, 200, 300)), instance("c", held("c", 2_000, 2_500, 3_000)))
    view = with_last_tick(view, 4.0)
    (moved,), (ideal,) = (
        set_stages(Cascade(smoothing=smoothing).on_tick(view, now_s)) for smoothing in (0.2, 1.0)
    )
    old, best = STAGES[0].hi, ideal.stages[0].hi
    assert best != old
    assert moved.stages[0].hi == pytest.approx(old + share * (best - old), abs=1)


def offers(actions: Iterable[Action]) -> list[Offer]:
    return [a for a in actions if isinstance(a, Offer)]


# ---- stages


def set_stages(actions: Iterable[Action]) -> list[SetStages]:
    return [a for a in actions if isinstance(a, SetStages)]


# The requests of one minute: many short ones and few long ones.
MINUTE = [(150, 50)] * 900 + [(300, 100)] * 90 + [(9_000, 500)] * 20 + [(20_000, 300)] * 5


def period(rows: Sequence[tuple[int, int]] = MINUTE, seconds: float = 60.0) -> LengthStatistics:
    """Return the statistics of a period in which every request finished."""
    return LengthStatistics.of(seconds, [prompt for prompt, _ in rows], rows)


def crowded(count: int = 8, stages: tuple[Stage, ...] = ()) -> ClusterView:
    """Return a cluster at the end of that minute."""
    members = (instance(f"w{n}", held(f"w{n}", *[200] * 30, 300, 9_000 + n, 20_000)) for n in range(count))
    return replace(cluster(*members, stages=stages), lengths=period(), last_tick_s=59.5)


def test_stages_are_planned_once_a_period_of_statistics_exists() -> None:
    """Planning only from requests in flight would follow the backlog of slow stages."""
    view = crowded()
    assert not set_stages(POLICY.on_tick(replace(view, lengths=None), 60.0))
    assert not set_stages(POLICY.on_tick(replace(view, lengths=period(MINUTE[:39])), 60.0))
    assert not set_stages(POLICY.on_tick(view, 59.9))
    (planned,) = set_stages(POLICY.on_tick(view, 60.0))
    assert tiles(planned.stages, MAX_LENGTH)
    assert len(planned.stages) > 1
    staged_view = replace(view, stages=planned.stages)
    assert not set_stages(POLICY.on_tick(with_last_tick(staged_view, 60.0), 61.0))
    # Planning again for the same minute changes nothing.
    assert [
        a.stages for a in set_stages(Cascade(refine_s=1e6).on_tick(with_last_tick(staged_view, 119.5), 120.0))
    ] == []


def test_with_a_history_stages_are_planned_at_once() -> None:
    policy = Cascade(history=[(100, 100)] * 90 + [(20_000, 2_000)] * 10)
    (planned,) = set_stages(policy.on_tick(cluster(*(instance(f"w{n}") for n in range(8))), 1.0))
    assert len(planned.stages) > 1
    assert not set_stages(policy.on_tick(with_last_tick(cluster(), 1.0), 2.0))


def one_stage(view: ClusterView) -> ClusterView:
    return replace(view, stages=(Stage(0, MAX_LENGTH, tuple(view.instances)),))


def test_stages_are_replanned_for_enough_gain() -> None:
    view = one_stage(crowded())
    (planned,) = set_stages(POLICY.on_tick(view, 60.0))
    assert len(planned.stages) > 1
    # Not between planning times, and not for a marginally better plan.
    assert not set_stages(POLICY.on_tick(with_last_tick(view, 60.0), 61.0))
    assert not set_stages(Cascade(least_plan_gain=0.99).on_tick(view, 60.0))


def test_requests_in_flight_do_not_affect_the_plan() -> None:
    """The backlog of an overloaded stage shows what its instances cannot do, not the demand: planning by it
    starved the short stage."""
    view = one_stage(crowded())
    (planned,) = set_stages(POLICY.on_tick(view, 60.0))
    full = instance(
        "w7",
        (
            *held("w7", *[20_000] * 12),
            *(request(f"long{n}", "w7", 15_000, phase=Phase.PREFILL) for n in range(40)),
        ),
    )
    # The number of running requests, here and in total, is as before.
    backlogged = replace(view, instances={**view.instances, "w7": replace(full, running=33)})
    assert set_stages(POLICY.on_tick(backlogged, 60.0)) == [planned]


def test_an_overloaded_stage_is_planned_by_arrivals() -> None:
    """Only a quarter of the long prompts finished, but the plan is for all that arrived."""
    slow = [row for row in MINUTE if row[0] < 1_000] + [(9_000, 500)] * 5 + [(20_000, 300)]
    view = one_stage(crowded())
    (planned,) = set_stages(POLICY.on_tick(view, 60.0))
    late = replace(view, lengths=LengthStatistics.of(60.0, [prompt for prompt, _ in MINUTE], slow))
    (same,) = set_stages(POLICY.on_tick(late, 60.0))
    counts = [[len(stage.instance_ids) for stage in action.stages] for action in (planned, same)]
    assert counts[0] == counts[1]
    (missed,) = set_stages(POLICY.on_tick(replace(view, lengths=period(slow)), 60.0))
    assert [len(stage.instance_ids) for stage in missed.stages] != counts[0]


def test_stages_of_the_baseline_policies() -> None:
    (chained,) = set_stages(Cascade(layout=CHAIN).on_tick(crowded(), 60.0))
    assert all(len(stage.instance_ids) == 1 for stage in chained.stages)
    (one,) = set_stages(Cascade(layout=ONE_STAGE).on_tick(crowded(), 60.0))
    assert len(one.stages) == 1


@settings(quick, max_examples=80)
@given(
    view=fleets(staged=True),
    ticks=st.lists(st.sampled_from([1.0, 5.0, 60.0]), max_size=5),
    rows=st.lists(st.tuples(st.integers(1, 200_000), st.integers(1, 5_000)), max_size=60),
)
def test_stages_always_cover_all_lengths(
    view: ClusterView, ticks: list[float], rows: list[tuple[int, int]]
) -> None:
    view = replace(view, lengths=period(rows, 30.0))
    for now in ticks:
        for action in set_stages(POLICY.on_tick(view, now)):
            view = replace(view, stages=action.stages)
        members = {n for n, i in view.instances.items() if i.state is not InstanceState.DRAINING}
        assert {name for stage in view.stages for name in stage.instance_ids} == members
        assert not members or tiles(view.stages, MAX_LENGTH)


# ---- overload


def test_planned_stages_can_keep_up() -> None:
    """Long prompts take 1.3 s each and arrive at 1.5/s; Eq. (1) alone gives them one instance."""
    rows = [(100, 100)] * 6_000 + [(20_000, 100)] * 90
    view = replace(one_stage(crowded()), lengths=period(rows))
    by_paper, bounded = Cascade(most_work=0.0), Cascade()
    (by_equation,) = set_stages(by_paper.on_tick(view, 60.0))
    (planned,) = set_stages(bounded.on_tick(view, 60.0))
    assert instances_for_long_prompts(by_equation.stages) < instances_for_long_prompts(planned.stages)
    # If the current stages fall behind, a plan that keeps up is made regardless of its gain.
    falling = replace(view, stages=by_equation.stages)
    assert set_stages(Cascade(least_plan_gain=1.0).on_tick(falling, 60.0))
    assert not set_stages(Cascade(least_plan_gain=1.0, most_work=0.0, refine_s=1e6).on_tick(falling, 60.0))


def instances_for_long_prompts(stages: tuple[Stage, ...]) -> int:
    """Return the number of instances in the stage of a prompt of 20,000 tokens."""
    return len(next(s for s in stages if s.hi > 20_000).instance_ids)


def test_an_overloaded_cluster_is_not_divided() -> None:
    """Any division gives some instance more work than a single stage does; the paper's rule divides."""
    rows = [(100, 1_000)] * 60_000 + [(20_000, 500)] * 2_000
    view = replace(one_stage(crowded()), lengths=period(rows))
    (by_equation,) = set_stages(Cascade(most_work=0.0).on_tick(view, 60.0))
    assert len(by_equation.stages) > 1
    assert not set_stages(Cascade(least_plan_gain=0.0).on_tick(view, 60.0))
    (united,) = set_stages(POLICY.on_tick(replace(view, stages=by_equation.stages), 60.0))
    assert [(stage.lo, stage.hi) for stage in united.stages] == [(0, MAX_LENGTH)]


def test_the_penalty_for_unequal_lengths_affects_plans_if_enabled() -> None:
    """Eq. (1) with the penalty of figure 2 leads to more stages than without."""
    penalty = load_length_penalty("cascadeinfer-figure-2-step")
    view = replace(crowded(16), lengths=period([(n % 700 + 30, 300) for n in range(3_000)]))
    plain, known, weighed = (
        set_stages(policy.on_tick(one_stage(view), 60.0))
        for policy in (
            Cascade(least_plan_gain=0.0),
            Cascade(least_plan_gain=0.0, penalty=penalty),
            Cascade(least_plan_gain=0.0, penalty=penalty, plan_penalty=True),
        )
    )
    assert plain == known
    assert len(weighed[0].stages) > len(plain[0].stages)


# ---- waiting prompts


def waiting(where: str, *prompts: int) -> InstanceView:
    """Return an instance with waiting prompts, in order of arrival."""
    held_here = tuple(
        replace(request(f"{where}-p{n}", where, tokens, phase=Phase.PREFILL), arrival_s=float(n + 1))
        for n, tokens in enumerate(prompts)
    )
    return instance(where, held_here)


def returns(view: ClusterView) -> list[ReturnPrompts]:
    actions = Cascade(outlier=1e9).on_tick(with_last_tick(view, 0.5), 1.0)
    return [a for a in actions if isinstance(a, ReturnPrompts)]


def test_prompts_waiting_in_the_wrong_stage_are_returned() -> None:
    """The first prompt has no queue before it, and those of 500 tokens are in the right stage."""
    view = staged(waiting("a", 2_000, 500, 3_000, 500, 9_000))
    assert returns(view) == [ReturnPrompts("a", ("a-p2", "a-p4"))]


def test_prompts_are_returned_only_for_a_shorter_queue() -> None:
    busy = [waiting(name, *[4_000] * 3) for name in "cd"]
    assert returns(staged(waiting("a", 500, 2_000, 500, 3_000), *busy)) == []
    # Each prompt joins a queue, which is then longer for the next one.
    view = staged(waiting("a", 4_000, 3_000, 3_000, 3_000), *[waiting(name, 1_000) for name in "cd"])
    assert returns(view) == [ReturnPrompts("a", ("a-p1", "a-p2"))]


@pytest.mark.parametrize("why", ["running", "has output tokens", "no instance in its stage", "draining"])
def test_other_prompts_stay(why: str) -> None:
    source = waiting("a", 4_000, 2_000)
    first, second = source.requests
    view = staged(source)
    match why:
        case "running":
            second = replace(second, state=RequestState.RUNNING)
        case "has output tokens":
            second = replace(second, output_tokens=5)
        case "no instance in its stage":
            gone = (instance(name, state=InstanceState.SUSPECT) for name in "cd")
            view = staged(source, *gone)
        case "draining":
            source = replace(source, state=InstanceState.DRAINING)
    instances = {**view.instances, "a": replace(source, requests=(first, second))}
    assert returns(replace(view, instances=instances)) == []


@quick
@given(fleets(staged=True))
def test_returned_prompts_would_be_placed_in_another_stage(view: ClusterView) -> None:
    for action in returns(view):
        source = view.instances[action.instance_id]
        at = stage_of(view.stages, action.instance_id)
        assert at is not None and len(set(action.request_ids)) == len(action.request_ids)
        for request_id in action.request_ids:
            moved = next(r for r in source.requests if r.request_id == request_id)
            assert moved.phase is Phase.PREFILL and moved.state is RequestState.WAITING
            new = Arrival(request_id, moved.prompt_tokens, 10, 0, excluded=frozenset({action.instance_id}))
            placed = Cascade().place(view, new, 1.0)
            assert isinstance(placed, Place)
            assert stage_of(view.stages, placed.instance_id) != at


# ---- rebalance


def test_an_overloaded_outlier_offers_requests_to_its_peers() -> None:
    """It offers the longest first, down to the mean; no peer becomes an outlier."""
    view = cluster(
        instance("a", held("a", 4_000, 2_000, 500, 300)),
        instance("b", held("b", 800)),
        stages=(Stage(0, MAX_LENGTH, ("a", "b")),),
    )
    # The mean demand is 3,808 tokens in whole blocks; no peer may hold more than 1.25 of it.
    assert list(POLICY.on_tick(with_last_tick(view, 0.5), 1.0)) == [
        Offer(f"a{n}", "a", ("b",), "overloaded", 4_760) for n in (1, 2, 3)
    ]
    assert not Cascade(rebalance=False).on_tick(with_last_tick(view, 0.5), 1.0)


def test_migrating_requests_do_not_count_for_an_outlier() -> None:
    view = cluster(
        instance("a", (*held("a", 4_000), request("gone", "a", 2_780, 10, migrating=True), *held("x", 16))),
        instance("b", held("b", 800)),
        stages=(Stage(0, MAX_LENGTH, ("a", "b")),),
    )
    assert demand(view.instances["a"]) == 6_816
    # Of the 3,008 tokens above the mean, 2,790 are leaving.
    assert [o.request_id for o in offers(POLICY.on_tick(with_last_tick(view, 0.5), 1.0))] == ["x0"]


@quick
@given(fleets(staged=True), st.floats(1.0, 2.0))
def test_rebalancing_stays_within_the_stage_and_creates_no_outliers(
    view: ClusterView, outlier: float
) -> None:
    policy = Cascade(outlier=outlier)
    brought: dict[str, int] = {}
    for offer in offers(policy.on_tick(with_last_tick(view, 0.5), 1.0)):
        assert offer.reason == "overloaded"
        stage = next(s for s in view.stages if offer.source_id in s.instance_ids)
        source = view.instances[offer.source_id]
        length = next(r.context_tokens for r in source.requests if r.request_id == offer.request_id)
        peers = [view.instances[name] for name in stage.instance_ids]
        peers = [i for i in peers if i.state is InstanceState.ACTIVE]
        mean = sum(map(demand, peers)) / len(peers)
        assert demand(source) > outlier * mean
        # No receiver may become an outlier; by the view, the first one does not.
        assert offer.most_tokens == math.floor(outlier * mean)
        assert set(offer.receiver_ids) < set(stage.instance_ids)
        first = offer.receiver_ids[0]
        brought[first] = brought.get(first, 0) + length
        assert demand(view.instances[first]) + brought[first] <= outlier * mean


def demand(instance: InstanceView) -> int:
    return instance.kv_used_tokens + instance.prefill_backlog_tokens


# ---- Llumnix


def test_llumnix_dispatches_to_the_freest_instance() -> None:
    view = cluster(
        instance("a", held("a", 5_000)), instance("b", held("b", 5_000, 100)), instance("c", capacity=100)
    )
    assert Llumnix().place(view, arrival(10), 0.0) == Place("a")


def test_llumnix_pairs_the_fullest_with_the_emptiest_instance() -> None:
    full = instance("a", held("a", 5_008, 1_008, 3_008), capacity=9_088)
    fuller = instance("b", held("b", 5_008, 2_000), capacity=7_008)
    view = cluster(full, fuller, instance("c"), instance("d", held("d", 100)))
    assert [*Llumnix().on_tick(view, 0.0)] == [
        Migrate("b1", "b", "c", "load"),
        Migrate("a1", "a", "d", "load"),
    ]


@quick
@given(fleets())
def test_llumnix_relieves_only_full_instances_and_overloads_no_target(view: ClusterView) -> None:
    policy = Llumnix()
    moves: list[Action] = [*policy.on_tick(view, 0.0)]
    for move in moves:
        assert isinstance(move, Migrate)
        source, target = view.instances[move.source_id], view.instances[move.target_id]
        moved = next(r for r in source.requests if r.request_id == move.request_id)
        assert moved.phase is not Phase.PREFILL
        assert freeness(source) < policy.migrate_below
        assert freeness(target, moved.context_tokens, 1) >= policy.migrate_below
