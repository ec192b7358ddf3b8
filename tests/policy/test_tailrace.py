"""The tailrace policy: properties of every decision, and the purpose of each part of its cost."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.actions import Action, Migrate, Place, Refuse, SetPool
from tailrace.cluster import (
    Arrival,
    ClusterView,
    InstanceState,
    InstanceView,
    Phase,
    Pool,
    RequestView,
    Stage,
)
from tailrace.handover import TRANSFERS
from tailrace.intra.earliest_due import EarliestDue, due_s, nominal_s
from tailrace.intra.registry import make_intra
from tailrace.perf.length_penalty import load_length_penalty
from tailrace.perf.measured import Measured
from tailrace.perf.qoe_model import QoeModel
from tailrace.perf.steps import StepModel
from tailrace.perf.ttft import TtftPredictor
from tailrace.policy.candidates import Ledger, needed_tokens
from tailrace.policy.columns import PerInstances
from tailrace.policy.registry import load
from tailrace.policy.requests import movable
from tailrace.policy.tailrace.costs import Costs, Longest
from tailrace.policy.tailrace.moves import MovePlanner, remaining_tokens
from tailrace.policy.tailrace.offers import FEW, OfferPlanner
from tailrace.policy.tailrace.policy import Tailrace
from tailrace.policy.tailrace.queue import Queue
from tailrace.policy.tailrace.targets import Decoders, Targets, decoders, within_stage
from tailrace.profiles import load_profile
from tests.policy.clusters import arrivals as more_arrivals
from tests.policy.clusters import clusters
from tests.policy.fleets import arrivals, cluster, fleets, instance, quick, request
from tests.policy.tailrace_arrival import cheapest

PENALTY = load_length_penalty("cascadeinfer-figure-2-step")
POLICIES = [
    Tailrace(),
    Tailrace(load_profile("r1-distill-qwen-32b-h100"), PENALTY),
    # Migrations are free: any saving suffices.
    Tailrace(margin=0.0),
]
views = fleets(pools=(None, *Pool)) | fleets(staged=True) | fleets() | clusters()


def planning(costs: Costs, few: int) -> PerInstances[OfferPlanner]:
    """Return planners that evaluate up to `few` instances one by one."""
    return PerInstances(lambda: OfferPlanner(costs, few))


def check(view: ClusterView, actions: Sequence[Action]) -> None:
    """Assert that each migration is possible in the view, and all of them together."""
    taken: dict[str, int] = {}
    pairs: set[tuple[str, str]] = set()
    moved: set[str] = set()
    for action in actions:
        if isinstance(action, SetPool):
            assert view.instances[action.instance_id].state is InstanceState.ACTIVE
            continue
        assert isinstance(action, Migrate)
        source, target = view.instances[action.source_id], view.instances[action.target_id]
        held = next(r for r in source.requests if r.request_id == action.request_id)
        # One migration of a request at a time.
        assert not held.migrating and held.request_id not in moved
        moved.add(held.request_id)
        # No opposite migrations between two instances, whether new or still open.
        assert source is not target
        assert (action.target_id, action.source_id) not in pairs
        assert not (source.migrations_in and target.migrations_out)
        pairs.add((action.source_id, action.target_id))
        # Not more than fits.
        assert target.state is InstanceState.ACTIVE
        taken[action.target_id] = taken.get(action.target_id, 0) + needed_tokens(held, target)
        assert taken[action.target_id] <= target.kv_free_tokens
        assert target.max_model_len <= 0 or held.context_tokens < target.max_model_len


@quick
@given(view=views, arrival=arrivals | more_arrivals)
def test_arrivals_are_placed_on_a_live_instance(view: ClusterView, arrival: Arrival) -> None:
    usable = {i.instance_id for i in view.placeable()} - arrival.excluded
    for policy in POLICIES:
        placement = policy.place(view, arrival, 0.0)
        assert policy.place(view, arrival, 0.0) == placement
        if usable:
            assert isinstance(placement, Place) and placement.instance_id in usable
            check(view, placement.also)
        else:
            assert isinstance(placement, Refuse)


@quick
@given(view=views, now=st.sampled_from([0.0, 1.0, 61.5]))
def test_ticks_are_sound(view: ClusterView, now: float) -> None:
    for policy in POLICIES:
        actions = policy.on_tick(view, now)
        assert list(policy.on_tick(view, now)) == list(actions)
        check(view, actions)


@quick
@given(view=views, pick=st.integers(0, 1_000))
def test_decisions_on_one_request_are_sound(view: ClusterView, pick: int) -> None:
    held = [r for i in view.instances.values() for r in i.requests if r.phase is not Phase.PREFILL]
    if not held:
        return
    chosen = held[pick % len(held)]
    for policy in POLICIES:
        for call in (policy.on_prefill_done, policy.on_reasoning_ended, policy.on_length_boundary):
            actions = call(view, chosen, 0.0)
            assert list(call(view, chosen, 0.0)) == list(actions)
            migrations = [a for a in actions if isinstance(a, Migrate)]
            assert len(migrations) <= 1
            assert all(m.request_id == chosen.request_id for m in migrations)
            check(view, actions)


def test_a_flipped_instance_is_a_target_under_the_same_rules() -> None:
    """If no decode instance has room, Arrow flips one. Outgoing migrations can rule it out as a target."""
    policy, done = Tailrace(), request("r", "a")
    source = instance("a", (done,), pool=Pool.PREFILL, migrations=(1, 0))
    late = instance("b", (request("x", "b"),), pool=Pool.DECODE, token_interval_s=0.5)
    for leaving, target in ((0, "c"), (1, "b")):
        spare = instance("c", pool=Pool.PREFILL, migrations=(0, leaving))
        view = cluster(source, late, spare)
        assert list(policy.on_prefill_done(view, done, 0.0)) == [
            SetPool("c", Pool.DECODE),
            Migrate("r", "a", target, "prefill done"),
        ]


@quick
@given(view=fleets(pools=(Pool.PREFILL, Pool.DECODE), all_active=True), arrival=arrivals)
def test_prompts_go_to_the_prefill_pool(view: ClusterView, arrival: Arrival) -> None:
    """Prompts go to a prefill instance if there is one."""
    policy = Tailrace(ttft_slo_s=1e9)
    placement = policy.place(view, arrival, 0.0)
    able = [i for i in view.placeable() if i.instance_id not in arrival.excluded]
    if able and any(i.pool is Pool.PREFILL for i in able):
        assert isinstance(placement, Place)
        assert view.instances[placement.instance_id].pool is Pool.PREFILL


@quick
@given(view=fleets(), tokens=st.integers(1, 5_000))
def test_the_cost_of_staying_equals_the_cost_of_returning(view: ClusterView, tokens: int) -> None:
    """Otherwise a request would move back and forth."""
    for costs in (Costs(StepModel.of_profile(None)), Costs(StepModel.of_profile(None), PENALTY)):
        for here in view.instances.values():
            new = request("x", here.instance_id, tokens, 16)
            joined = dataclasses.replace(
                here,
                requests=(*here.requests, new),
                running=here.running + 1,
                kv_used_tokens=here.kv_used_tokens + new.context_tokens,
                kv_capacity_tokens=10**9,
            )
            roomy = dataclasses.replace(here, kv_capacity_tokens=10**9)
            longest = Longest.of(here).tokens
            assert Longest.of(joined).without("x") == longest
            staying = costs.staying_s(joined, new.context_tokens, 100.0, longest)
            assert staying == pytest.approx(costs.joining_s(roomy, new.context_tokens, 100.0, longest))


@quick
@given(view=fleets(), tokens=st.integers(1, 50_000))
def test_no_slowdown_is_below_the_bound_of_its_target(view: ClusterView, tokens: int) -> None:
    instances = list(view.instances.values())
    longest = {i.instance_id: Longest.of(i).tokens for i in instances}
    for costs in (Costs(StepModel.of_profile(None)), Costs(StepModel.of_profile(None), PENALTY)):
        # The second list is long enough to be examined in order of the bounds.
        for among in (instances, instances * 25):
            targets = Targets.of(costs, among)
            candidates = list(targets.by_slowdown(tokens))
            assert sorted(position for _, position, _ in candidates) == list(range(len(among)))
            assert [bound for bound, _, _ in candidates] == sorted(bound for bound, _, _ in candidates)
            for bound_s, position, target in candidates:
                assert target is among[position]
                slowdown_s = costs.slowdown_s(target, tokens, longest[target.instance_id])
                assert targets.least_slowdown_s(tokens) <= bound_s <= slowdown_s


@quick
@given(view=fleets(), least_gain_s=st.floats(0.0, 10.0))
def test_the_best_move_does_not_depend_on_the_order_of_examination(
    view: ClusterView, least_gain_s: float
) -> None:
    costs = Costs(StepModel.of_profile(None))
    many = [
        dataclasses.replace(i, instance_id=f"{i.instance_id}-{n}", running=i.running + n % 3)
        for n in range(25)
        for i in view.instances.values()
    ]
    for source in view.instances.values():
        for moved in source.requests:
            mover = MovePlanner(costs, Ledger(view.instances, 3, 3), 2.0)
            ordered = mover.best(moved, source, Targets.of(costs, many), least_gain_s)
            one_by_one = [mover.best(moved, source, Targets.of(costs, [t]), least_gain_s) for t in many]
            gains = [move.gain_s for move in one_by_one if move is not None]
            assert (ordered is None) == (not gains)
            if ordered is not None:
                assert ordered.gain_s == max(gains)
                first = next(move for move in one_by_one if move is not None and move.gain_s == max(gains))
                assert ordered.target is first.target


@quick
@given(view=fleets(), margin=st.sampled_from([0.0, 2.0]))
def test_the_request_that_gains_most_moves(view: ClusterView, margin: float) -> None:
    for costs in (Costs(StepModel.of_profile(None)), Costs(StepModel.of_profile(None), PENALTY)):
        targets = Targets.of(costs, list(view.instances.values())[:3])
        for source in view.instances.values():
            mover = MovePlanner(costs, Ledger(view.instances, 3, 3), margin)
            moves = [mover.best(moved, source, targets) for moved in source.requests if movable(moved)]
            gains = [move.gain_s for move in moves if move is not None and move.gain_s > 0.0]
            best = mover.best_of(source, targets)
            assert (best is None) == (not gains)
            assert best is None or best.gain_s == pytest.approx(max(gains), rel=1e-9)


@quick
@given(views=st.lists(fleets(), min_size=2, max_size=3))
def test_earlier_views_do_not_affect_which_instances_may_receive(views: list[ClusterView]) -> None:
    costs = Costs(StepModel.of_profile(None))
    used = Decoders(costs)
    for view in views:
        several = {f"{name}-{n}": i for n in range(13) for name, i in view.instances.items()}
        large = ClusterView({name: dataclasses.replace(i, instance_id=name) for name, i in several.items()})
        for each in (view, large):
            among = [i for i in decoders(each.placeable()) if i.migrations_in < TRANSFERS]
            expected = _by_slowdown(Targets.of(costs, among))
            assert _by_slowdown(used.targets(each)) == expected


def _by_slowdown(targets: Targets) -> list[tuple[float, str]]:
    return sorted((slowdown_s, found.instance_id) for slowdown_s, _, found in targets.by_slowdown(100))


def test_the_policy_is_registered_by_name() -> None:
    policy = load("tailrace")
    assert type(policy) is Tailrace and policy.summary
    assert isinstance(make_intra(Tailrace.batch_order), EarliestDue)


def test_instances_without_reports_get_requests() -> None:
    """They get requests, and nothing is migrated."""
    view = ClusterView(MappingProxyType({name: InstanceView(name) for name in ("w0", "w1")}))
    policy = Tailrace()
    placement = policy.place(view, Arrival("new", 100, 100, 0), 0.0)
    assert placement == Place("w0")
    assert list(policy.on_tick(view, 0.0)) == []
    empty = ClusterView(MappingProxyType({}))
    assert isinstance(policy.place(empty, Arrival("new", 100, 100, 0), 0.0), Refuse)
    assert list(policy.on_tick(empty, 0.0)) == []


def crowded(count: int = 40, output: int = 2_000, capacity: int = 400_000) -> ClusterView:
    """Return one instance with all the requests and an idle one."""
    held = tuple(request(f"r{n}", "w0", 1_000, output, Phase.REASONING) for n in range(count))
    return cluster(instance("w0", held, capacity=capacity), instance("w1"))


def test_an_arrival_goes_to_the_shorter_queue() -> None:
    queued = tuple(request(f"q{n}", "w0", 4_000, 0, Phase.PREFILL) for n in range(5))
    placement = Tailrace().place(
        cluster(instance("w0", queued), instance("w1", queued[:1])), Arrival("new", 500, 100, 0), 0.0
    )
    assert placement == Place("w1")


def test_a_waiting_long_prompt_does_not_deter_a_short_one() -> None:
    """The short prompt is served first: only work served before it counts."""
    long = (request("q0", "w0", 60_000, 0, Phase.PREFILL),)
    short = tuple(request(f"q{n}", "w1", 400, 0, Phase.PREFILL) for n in range(12))
    view = cluster(instance("w0", long), instance("w1", short))
    assert Tailrace().place(view, Arrival("new", 500, 100, 0), 0.0) == Place("w0")
    # A prompt as long as the first has to wait for it.
    assert Tailrace().place(view, Arrival("new", 60_000, 100, 0), 0.0) == Place("w1")


@quick
@given(view=fleets(), prompts=st.lists(st.integers(1, 50_000), min_size=1, max_size=6))
def test_cached_state_does_not_affect_placements(view: ClusterView, prompts: list[int]) -> None:
    for penalty in (None, PENALTY):
        used = Tailrace(penalty=penalty)
        for seq, prompt in enumerate(prompts):
            new = Arrival("new", prompt, 100, seq)
            assert used.place(view, new, 1.0) == Tailrace(penalty=penalty).place(view, new, 1.0)
            # One instance sends a new report and is empty.
            name = sorted(view.instances)[seq % len(view.instances)]
            view = cluster(*({**view.instances, name: instance(name)}.values()))


@st.composite
def reporting(draw: st.DrawFn) -> ClusterView:
    """Draw instances of two kinds, one of them measured, with prompts that arrived at different times.

    Some list their prompts; for some, the backlog is partly unknown or partly computed.
    """
    rng = random.Random(draw(st.integers(0, 2**32)))
    slow = load_profile("llama-3.2-3b-l40")
    steps = StepModel.of_profile(slow, 512)
    measured = Measured(slow, TtftPredictor.of_profile(slow), steps, QoeModel.of_profile(slow))
    members = []
    for here in draw(fleets() | fleets(staged=True) | clusters(least=1)).instances.values():
        held = tuple(dataclasses.replace(r, arrival_s=rng.uniform(0.0, 8.0)) for r in here.requests)
        there = dataclasses.replace(here, requests=held)
        if rng.random() < 0.4:
            backlog = int(there.prefill_backlog_tokens * rng.choice((0.3, 2.0)))
            there = dataclasses.replace(there, prefill_backlog_tokens=backlog)
        if rng.random() < 0.3:
            there = dataclasses.replace(there, measured=measured)
        members.append(there)
    return cluster(*members)


@quick
@given(
    views=st.lists(reporting(), min_size=1, max_size=3),
    lengths=st.lists(st.integers(1, 50_000), min_size=4, max_size=8),
)
def test_placements_follow_the_reference_formula(views: list[ClusterView], lengths: list[int]) -> None:
    """Instances are evaluated one by one or as columns; between views, only some send new reports."""
    for penalty, few in itertools.product((None, PENALTY), (0, FEW)):
        policy = Tailrace(penalty=penalty)
        policy.offers = planning(policy.costs, few)
        for n, prompt in enumerate(lengths):
            view = views[n % len(views)]
            known = views[(n - 1) % len(views)].instances
            # Instances without a new report are the same objects as before.
            kept = {name: known.get(name, new) if n % 2 else new for name, new in view.instances.items()}
            usable = [i for i in cluster(*kept.values()).placeable() if i.pool is None]
            if not usable:
                continue
            placement = policy.place(cluster(*usable), Arrival("new", prompt, 100, n), 4.0)
            assert placement == Place(cheapest(policy.costs, usable, prompt, 4.0).instance_id)


@quick
@given(view=fleets() | clusters())
def test_prices_are_the_cost_of_one_more_request_of_mean_length(view: ClusterView) -> None:
    instances = list(view.instances.values())
    for penalty, few in itertools.product((None, PENALTY), (0, FEW)):
        costs = Costs(StepModel.of_profile(None), penalty)
        offers = OfferPlanner(costs, few)
        offers.update(costs, view)
        assert offers.prices_s() == {
            i.instance_id: costs.joining_s(i, i.context_tokens // max(1, i.load), costs.expected_tokens)
            for i in instances
        }


@quick
@given(view=fleets(staged=True), prompt=st.integers(1, 50_000))
def test_within_a_stage_the_cheapest_instance_is_chosen(view: ClusterView, prompt: int) -> None:
    for few in (0, FEW):
        policy = Tailrace()
        policy.offers = planning(policy.costs, few)
        placement = policy.place(view, Arrival("new", prompt, 100, 0), 0.0)
        if usable := view.placeable():
            within = within_stage(view, usable, prompt)
            assert placement == Place(cheapest(policy.costs, within, prompt, 0.0).instance_id)


@quick
@given(lengths=st.lists(st.integers(1, 50_000), max_size=8), new=st.integers(1, 50_000))
def test_a_queue_computes_the_work_before_a_due_time(lengths: list[int], new: int) -> None:
    steps = StepModel.of_profile(None)
    queue = Queue.of([(0.0, length) for length in lengths], sum(lengths), steps)
    assert queue.queued_s == pytest.approx(sum(nominal_s(length, length * length) for length in lengths))
    tokens, seconds, after = queue.before(due_s(0.0, new, queue.queued_s))
    # All prompts arrived at the same time and are due in order of length.
    found_s, dues = 0.0, []
    for length in sorted(lengths):
        dues.append((due_s(0.0, length, found_s), length))
        found_s += nominal_s(length, length * length)
    first = [length for due, length in dues if due <= due_s(0.0, new, queue.queued_s)]
    assert (tokens, after) == (sum(first), len(lengths) - len(first))
    assert seconds == pytest.approx(sum(map(steps.compute_s, first)))


def test_the_computed_part_of_a_prompt_is_not_waited_for() -> None:
    queue = Queue.of([(0.0, 4_000)], 1_000, StepModel.of_profile(None))
    assert queue.before(1e9)[0] == 1_000


def test_unlisted_prompts_count_as_served_first() -> None:
    unlisted = dataclasses.replace(instance("w0"), prefill_backlog_tokens=9_000, waiting=2)
    # A short prompt does not wait for a listed long one.
    long = instance("w1", (request("q0", "w1", 60_000, 0, Phase.PREFILL),))
    assert Tailrace().place(cluster(unlisted, long), Arrival("new", 500, 100, 0), 0.0) == Place("w1")


def test_a_short_prompt_goes_to_a_queue_it_can_overtake() -> None:
    # One long prompt waits on w0, two medium ones on w1.
    waiting = instance("w0", (request("q0", "w0", 30_000, 0, Phase.PREFILL),))
    others = tuple(request(f"q{n}", "w1", 6_000, 0, Phase.PREFILL) for n in (1, 2))
    view, new = cluster(waiting, instance("w1", others)), Arrival("new", 500, 100, 0)
    assert Tailrace().place(view, new, 0.0) == Place("w0")


def test_delaying_answering_costs_less_than_delaying_reasoning() -> None:
    reasoning = instance("w0", tuple(request(f"r{n}", "w0", phase=Phase.REASONING) for n in range(4)))
    answering = instance("w1", tuple(request(f"r{n}", "w1") for n in range(4)))
    assert Tailrace().place(cluster(reasoning, answering), Arrival("new", 500, 100, 0), 0.0) == Place("w1")


def test_a_tick_examines_no_request_in_vain_that_no_instance_may_receive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    examined: list[str] = []
    best = MovePlanner.best

    def counted(mover: MovePlanner, request: RequestView, *others: Any) -> Any:
        examined.append(request.request_id)
        return best(mover, request, *others)

    monkeypatch.setattr(MovePlanner, "best", counted)
    view = crowded()
    assert Tailrace().on_tick(view, 0.0) and examined
    examined.clear()
    receiving = dataclasses.replace(view.instances["w1"], migrations_in=TRANSFERS)
    assert not Tailrace().on_tick(cluster(view.instances["w0"], receiving), 0.0)
    assert not examined


def test_a_migration_must_save_more_than_its_transfer_costs() -> None:
    moves = Tailrace().on_tick(crowded(), 0.0)
    assert [(m.source_id, m.target_id) for m in moves if isinstance(m, Migrate)] == [("w0", "w1")]
    slow = Tailrace()
    slow.costs = dataclasses.replace(slow.costs, link_bytes_per_s=1e6)
    assert list(slow.on_tick(crowded(), 0.0)) == []


def test_a_migrated_request_must_gain_more_to_migrate_again() -> None:
    view = crowded(3, 100)
    policy = Tailrace(margin=0.5)
    assert policy.on_reasoning_ended(view, view.instances["w0"].requests[0], 0.0)
    often_migrated = dataclasses.replace(view.instances["w0"].requests[0], epoch=1_000)
    assert not policy.on_reasoning_ended(view, often_migrated, 0.0)


def test_a_request_leaves_an_instance_short_of_memory_for_its_answer() -> None:
    """PASCAL's reason to migrate, expressed in seconds: the answer would wait for KV."""
    tight = crowded(8, 2_000, capacity=8 * 3_000 + 64)
    ended = dataclasses.replace(
        tight.instances["w0"].requests[0], phase=Phase.ANSWERING, predicted_remaining_tokens=200.0
    )
    assert Tailrace().on_reasoning_ended(tight, ended, 0.0) == (Migrate("r0", "w0", "w1", "reasoning ended"),)


def test_a_request_about_to_finish_stays() -> None:
    view = crowded()
    ending = dataclasses.replace(view.instances["w0"].requests[0], predicted_remaining_tokens=1.0)
    assert not Tailrace().on_reasoning_ended(view, ending, 0.0)
    assert remaining_tokens(ending, 256.0) == 1.0


def test_with_a_length_penalty_similar_lengths_are_grouped() -> None:
    """CascadeInfer's reason for stages: a long request slows every step of the short ones next to it."""
    short = tuple(request(f"s{n}", "w0", 500, 100) for n in range(20))
    long = (request("l0", "w1", 11_000, 1_000),)
    view = cluster(instance("w0", short), instance("w1", long))
    new = Arrival("new", 12_000, 100, 0)
    assert Tailrace(penalty=PENALTY).place(view, new, 0.0) == Place("w1")


def test_a_prefilled_request_leaves_a_prefill_instance() -> None:
    done = request("r0", "w0", 1_000, 1)
    members = instance("w0", (done,), pool=Pool.PREFILL), instance("w1", pool=Pool.DECODE)
    actions = Tailrace().on_prefill_done(cluster(*members), done, 0.0)
    assert actions == [Migrate("r0", "w0", "w1", "prefill done")]
    unpooled = cluster(instance("w0", (done,)), instance("w1"))
    assert Tailrace().on_prefill_done(unpooled, done, 0.0) == ()


def test_an_outgrown_request_leaves_its_stage() -> None:
    grown = request("r0", "w0", 1_000, 100)
    stages = (Stage(0, 1_000, ("w0",)), Stage(1_000, 131_072, ("w1",)))
    view = cluster(instance("w0", (grown,)), instance("w1"), stages=stages)
    actions = Tailrace().on_length_boundary(view, grown, 0.0)
    assert actions == (Migrate("r0", "w0", "w1", "length boundary"),)
    # Alone on its instance it slows no other request: if the penalty is known, it stays.
    assert Tailrace(penalty=PENALTY).on_length_boundary(view, grown, 0.0) == ()
