"""Properties of every baseline policy on any cluster."""

from __future__ import annotations

from types import MappingProxyType

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tailrace.actions import Migrate, Place, Refuse
from tailrace.cluster import (
    Arrival,
    ClusterView,
    InstanceState,
    InstanceView,
    Phase,
    Pool,
    RequestState,
    RequestView,
)
from tailrace.policy.base import Policy
from tailrace.policy.least_loaded import LeastLoaded
from tailrace.policy.registry import UnknownPolicyError, load, names
from tailrace.policy.round_robin import RoundRobin
from tailrace.policy.static_pools import StaticPools

POLICIES = [RoundRobin, LeastLoaded, StaticPools]
IDS = [f"w{n}" for n in range(6)]


# A machine with other load is slow now and then; the search space is small.
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])

_drawn = st.tuples(
    st.sampled_from(InstanceState),
    st.none() | st.sampled_from(Pool),
    st.integers(0, 10_000),
    st.integers(0, 100),
    st.integers(0, 20),
    st.integers(0, 10_000),
)


def _cluster(drawn: list[tuple[InstanceState, Pool | None, int, int, int, int]]) -> ClusterView:
    """Return instances in any state, in ID order. The integers are capacity, percent used, load, backlog."""
    views = [
        InstanceView(
            instance_id=name,
            state=state,
            pool=pool,
            kv_capacity_tokens=capacity,
            kv_used_tokens=capacity * percent // 100,
            running=load,
            prefill_backlog_tokens=backlog,
        )
        for name, (state, pool, capacity, percent, load, backlog) in zip(IDS, drawn, strict=False)
    ]
    return ClusterView(MappingProxyType({view.instance_id: view for view in views}))


clusters = st.lists(_drawn, max_size=len(IDS)).map(_cluster)

arrivals = st.builds(
    Arrival,
    request_id=st.just("r"),
    prompt_tokens=st.integers(1, 10_000),
    max_tokens=st.integers(1, 10_000),
    seq=st.integers(0, 1_000),
    output_tokens=st.integers(0, 100),
    excluded=st.frozensets(st.sampled_from(IDS)),
)


@pytest.mark.parametrize("kind", POLICIES)
@quick
@given(view=clusters, arrival=arrivals, now=st.floats(0, 1e9))
def test_placement_is_on_a_usable_instance_and_stateless(
    kind: type[Policy], view: ClusterView, arrival: Arrival, now: float
) -> None:
    """A policy chooses a live instance that is not excluded, else refuses, and keeps no state."""
    placement = kind().place(view, arrival, now)
    usable = {i.instance_id for i in view.placeable()} - arrival.excluded
    if usable:
        assert isinstance(placement, Place)
        assert placement.instance_id in usable
    else:
        assert isinstance(placement, Refuse)
        assert placement.reason
    policy = kind()
    assert policy.place(view, arrival, now) == policy.place(view, arrival, now + 1) == placement


@quick
@given(view=clusters, arrival=arrivals)
def test_round_robin_uses_every_usable_instance(view: ClusterView, arrival: Arrival) -> None:
    """Consecutive arrivals, as many as there are usable instances, go to all of them."""
    usable = {i.instance_id for i in view.placeable()} - arrival.excluded
    placed = [
        RoundRobin().place(view, Arrival("r", 1, 1, arrival.seq + turn, excluded=arrival.excluded), 0.0)
        for turn in range(len(usable))
    ]
    assert {p.instance_id for p in placed if isinstance(p, Place)} == usable


@quick
@given(view=clusters, arrival=arrivals)
def test_least_loaded_chooses_the_smallest_share_of_kv(view: ClusterView, arrival: Arrival) -> None:
    placement = LeastLoaded().place(view, arrival, 0.0)
    if not isinstance(placement, Place):
        return

    def kv_share(instance: InstanceView) -> float:
        used = instance.kv_used_tokens + instance.prefill_backlog_tokens
        return used / max(1, instance.kv_capacity_tokens)

    chosen = kv_share(view.instances[placement.instance_id])
    usable = [i for i in view.placeable() if i.instance_id not in arrival.excluded]
    # The policy compares shares to the nearest thousandth.
    assert all(chosen <= kv_share(i) + 0.0011 for i in usable)


@quick
@given(view=clusters, where=st.sampled_from(IDS), prompt=st.integers(1, 10_000), migrating=st.booleans())
def test_static_pools_hand_over_to_a_decode_instance_that_can_hold_it(
    view: ClusterView, where: str, prompt: int, migrating: bool
) -> None:
    """The target is a live decode instance other than the source, where the request may wait for room."""
    request = RequestView(
        request_id="r",
        instance_id=where,
        phase=Phase.REASONING,
        state=RequestState.RUNNING,
        prompt_tokens=prompt,
        output_tokens=1,
        max_tokens=100,
        migrating=migrating,
    )
    actions = StaticPools().on_prefill_done(view, request, 0.0)
    assert actions == StaticPools().on_prefill_done(view, request, 1.0)
    assert len(actions) <= 1
    for action in actions:
        assert isinstance(action, Migrate)
        assert not migrating
        assert action.source_id == where != action.target_id
        target = view.instances[action.target_id]
        assert target.state is InstanceState.ACTIVE
        assert target.pool is Pool.DECODE
        assert target.kv_capacity_tokens >= request.context_tokens


def test_policies_are_loaded_by_name() -> None:
    assert {"least_loaded", "round_robin", "static_pools"} <= set(names())
    for name in names():
        policy = load(name)
        assert isinstance(policy, Policy)
        assert policy.summary
    with pytest.raises(UnknownPolicyError, match="least_loaded"):
        load("none_such")
