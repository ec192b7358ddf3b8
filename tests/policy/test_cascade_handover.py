"""Handovers by column are those that a comparison of every request with every receiver finds."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc import actuator
from tailrace.actions import Offer, ReturnPrompts, SetStages
from tailrace.cluster import ClusterView, InstanceView, Stage
from tailrace.policy.cascade.handover import HANDOVERS_MAX, REBALANCED_MAX, RECEIVERS_MAX
from tailrace.policy.cascade.layout import active_in, stage_of
from tailrace.policy.cascade.policy import ROUND_ROBIN, Cascade
from tests.policy.fleets import MAX_LENGTH, cluster, fleets, instance, quick, random_layout, request
from tests.policy.plain_handovers import PlainHandovers

# Each is asked about one fleet after another, so that what they keep of earlier ones would be noticed.
BY_BIDS = Cascade()
IN_TURNS = Cascade(handover=ROUND_ROBIN)


def varied(rng: random.Random, view: ClusterView) -> ClusterView:
    """Return the fleet with different block sizes and limits, in stages that name it in any order."""

    def changed(i: InstanceView) -> InstanceView:
        extra = rng.choice((0, 0, 64))
        held = tuple(replace(r, kv_tokens=r.kv_tokens + extra) for r in i.requests)
        return replace(
            i,
            block_tokens=rng.choice((16, 16, 32, 0)),
            max_model_len=rng.choice((0, MAX_LENGTH, MAX_LENGTH, 20_000)),
            requests=held,
        )

    names = list(view.instances)
    rng.shuffle(names)
    stages = random_layout(rng, names) if rng.random() < 0.8 else ()
    return cluster(*map(changed, view.instances.values()), stages=stages)


VARIED = st.builds(lambda seed, view: varied(random.Random(seed), view), st.integers(0, 2**32), fleets())


@quick
@given(view=VARIED)
@pytest.mark.parametrize("by_bids", [True, False])
def test_a_tick_hands_over_what_a_plain_comparison_finds(by_bids: bool, view: ClusterView) -> None:
    policy = BY_BIDS if by_bids else IN_TURNS
    # Refinements are due at 5 s, but not at 6 s.
    for now, refines in ((5.0, True), (6.0, False)):
        actions = policy.on_tick(replace(view, last_tick_s=now - 1.0), now)
        stages = next((a.stages for a in actions if isinstance(a, SetStages)), view.stages)
        plain = PlainHandovers(view, by_bids)
        expected = plain.of_all(stages) if refines else []
        for peers in [active_in(view, stage) for stage in stages] or [view.placeable()]:
            expected += plain.rebalance(peers, 1.25)
        assert [a for a in actions if not isinstance(a, SetStages | ReturnPrompts)] == expected


@quick
@given(view=VARIED)
@pytest.mark.parametrize("by_bids", [True, False])
def test_a_request_that_crosses_its_boundary_goes_where_a_plain_comparison_says(
    by_bids: bool, view: ClusterView
) -> None:
    policy = BY_BIDS if by_bids else IN_TURNS
    for source in view.instances.values():
        at = stage_of(view.stages, source.instance_id)
        for held in source.requests if at is not None else ():
            assert at is not None
            expected = PlainHandovers(view, by_bids).outgrown(view.stages, [(at, held)])
            assert list(policy.on_length_boundary(view, held, 0.0)) == expected


def crowded(on_offer: int) -> ClusterView:
    """Return two stages; 500 requests have outgrown the first, also after its boundary is refined."""
    held = tuple(request(f"r{n:03d}", "a", 1_000 + n, 0) for n in range(500))
    source = replace(instance("a", held), migrations_out=on_offer)
    stages = (Stage(0, 501, ("a",)), Stage(501, MAX_LENGTH, ("b", "c")))
    return cluster(source, *(instance(name, capacity=2_000_000) for name in "bc"), stages=stages)


@pytest.mark.parametrize("on_offer", [0, 200, 600])
def test_a_tick_orders_the_longest_requests_up_to_a_limit_of_open_handovers(on_offer: int) -> None:
    actions = Cascade(rebalance=False).on_tick(crowded(on_offer), 0.0)
    left = max(0, HANDOVERS_MAX - on_offer)
    assert offered(actions) == [f"r{n:03d}" for n in range(499, 499 - left, -1)]


@pytest.mark.parametrize(("open_elsewhere", "ordered"), [(0, REBALANCED_MAX), (400, HANDOVERS_MAX - 400)])
def test_rebalancing_orders_few_on_a_tick_and_stops_at_the_limit_of_open_handovers(
    open_elsewhere: int, ordered: int
) -> None:
    held = tuple(request(f"r{n:03d}", "a", 1_000) for n in range(900))
    peers = [replace(instance(name, capacity=4_000_000), migrations_out=open_elsewhere // 2) for name in "bc"]
    whole = cluster(instance("a", held, capacity=4_000_000), *peers)
    assert len(offered(Cascade().on_tick(whole, 0.0))) == ordered


def test_few_of_many_receivers_bid_those_with_the_least_demand() -> None:
    held = tuple(request(f"r{n:03d}", "a", 1_000) for n in range(900))
    loads = {f"b{n:03d}": 1_000 * (n * 37 % 100) for n in range(100)}
    peers = [
        instance(name, (request(f"on-{name}", name, tokens),) if tokens else ())
        for name, tokens in loads.items()
    ]
    offer = Cascade().on_tick(cluster(instance("a", held, capacity=4_000_000), *peers), 0.0)[0]
    assert isinstance(offer, Offer)
    assert set(offer.receiver_ids) == set(sorted(loads, key=loads.__getitem__)[:RECEIVERS_MAX])
    assert loads[offer.receiver_ids[0]] == 0


def test_a_scheduler_that_carries_out_the_most_handovers_can_do_something_else() -> None:
    assert HANDOVERS_MAX < actuator._OPEN_MAX


def offered(actions: object) -> list[str]:
    assert isinstance(actions, list)
    return [a.request_id for a in actions if isinstance(a, Offer)]
