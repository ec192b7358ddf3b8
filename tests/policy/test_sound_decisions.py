"""Properties of every decision of Arrow, CascadeInfer and their baselines on any cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.actions import Action, Migrate, Offer, Place, Refuse, SetPool, SetStages
from tailrace.cluster import Arrival, ClusterView, InstanceState, Phase, Pool
from tailrace.policy.arrow.policy import QUEUE, Arrow
from tailrace.policy.base import Policy
from tailrace.policy.cascade.layout import tiles
from tailrace.policy.cascade.llumnix import Llumnix
from tailrace.policy.cascade.policy import CHAIN, MEMORY, ONE_STAGE, QUANTITY, ROUND_ROBIN, Cascade
from tailrace.policy.static_pools import ROUND_ROBIN as POOLS_IN_TURN
from tailrace.policy.static_pools import StaticPools
from tests.policy.fleets import MAX_LENGTH, arrivals, fleets, quick

POOLED: list[Callable[[], Policy]] = [Arrow, StaticPools, partial(StaticPools, dispatch=POOLS_IN_TURN)]
STAGED: list[Callable[[], Policy]] = [
    Cascade,
    partial(Cascade, rebalance=False),
    partial(Cascade, handover=ROUND_ROBIN, rebalance=False),
    partial(Cascade, layout=CHAIN),
    partial(Cascade, layout=ONE_STAGE),
    partial(Cascade, boundaries=QUANTITY),
    partial(Cascade, boundaries=MEMORY),
]
# Built once: the tests show that a policy keeps no state.
POLICIES: list[Policy] = [
    *(kind() for kind in (*POOLED, *STAGED, Llumnix)),
    Arrow(room="filter", kv_wait=True),
    Arrow(kv_wait=True, flips="attainment"),
]
views = fleets(pools=(None, *Pool)) | fleets(staged=True)
# These include times at which refinement and replanning are due.
moments = st.sampled_from([0.0, 1.0, 5.0, 60.0, 61.5])


def check(policy: Policy, view: ClusterView, actions: Sequence[Action]) -> None:
    """Assert that migrations are possible, singly and together, and that pools and stages name instances."""
    # With these policies, the target queues requests without room (Arrow, section 5.4).
    queues = isinstance(policy, StaticPools) or (isinstance(policy, Arrow) and policy.room == QUEUE)
    taken: dict[str, int] = {}
    moved: set[str] = set()
    for action in actions:
        match action:
            case Migrate():
                source, target = view.instances[action.source_id], view.instances[action.target_id]
                request = next(r for r in source.requests if r.request_id == action.request_id)
                assert action.source_id != action.target_id
                assert target.state is InstanceState.ACTIVE
                assert not request.migrating
                assert action.request_id not in moved
                moved.add(action.request_id)
                taken[action.target_id] = taken.get(action.target_id, 0) + request.context_tokens
                assert queues or taken[action.target_id] <= target.kv_free_tokens
            case Offer():
                source = view.instances[action.source_id]
                request = next(r for r in source.requests if r.request_id == action.request_id)
                assert not request.migrating and action.request_id not in moved
                moved.add(action.request_id)
                assert action.receiver_ids and action.source_id not in action.receiver_ids
                asked = [view.instances[name] for name in action.receiver_ids]
                assert all(i.state is InstanceState.ACTIVE for i in asked)
                # By the view, the first receiver has room for everything that is offered to it first.
                first = action.receiver_ids[0]
                taken[first] = taken.get(first, 0) + request.context_tokens
                assert taken[first] <= asked[0].kv_free_tokens
            case SetPool():
                assert view.instances[action.instance_id].state is InstanceState.ACTIVE
            case SetStages():
                names = {name for stage in action.stages for name in stage.instance_ids}
                assert names <= view.instances.keys()
                assert not action.stages or tiles(action.stages, MAX_LENGTH)


@settings(quick, max_examples=150)
@given(view=views, arrival=arrivals, now=moments)
def test_placements_are_sound(view: ClusterView, arrival: Arrival, now: float) -> None:
    """An arrival is placed on a live instance that is not excluded, or refused if there is none."""
    usable = {i.instance_id for i in view.placeable()} - arrival.excluded
    for policy in POLICIES:
        placement = policy.place(view, arrival, now)
        if usable:
            assert isinstance(placement, Place), policy
            assert placement.instance_id in usable, policy
            check(policy, view, placement.also)
        else:
            assert isinstance(placement, Refuse), policy
        assert policy.place(view, arrival, now) == placement


@settings(quick, max_examples=150)
@given(view=views, now=moments)
def test_ticks_are_sound(view: ClusterView, now: float) -> None:
    for policy in POLICIES:
        actions = policy.on_tick(view, now)
        check(policy, view, actions)
        assert list(policy.on_tick(view, now)) == list(actions)


@settings(quick, max_examples=150)
@given(view=views, pick=st.integers(0, 1_000))
def test_decisions_on_one_request_are_sound(view: ClusterView, pick: int) -> None:
    """Decisions at the end of prefill and reasoning and at a length boundary."""
    held = [r for i in view.instances.values() for r in i.requests if r.phase is not Phase.PREFILL]
    if not held:
        return
    request = held[pick % len(held)]
    for policy in POLICIES:
        for call in (policy.on_prefill_done, policy.on_length_boundary, policy.on_reasoning_ended):
            actions = call(view, request, 0.0)
            check(policy, view, actions)
            assert list(call(view, request, 1.0)) == list(actions)
            moves = [a for a in actions if isinstance(a, Migrate | Offer)]
            assert len(moves) <= 1
            assert all(m.request_id == request.request_id for m in moves)
