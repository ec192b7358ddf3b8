"""Policies that imitate several schedulers, and front ends with leases."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.shards.leased import Leased, LeaseTerms
from experiments.shards.measure import Case, imbalance, measure
from experiments.shards.sharded import Sharded, request_key, session_key
from experiments.shards.tables import change, groups, table
from experiments.shards.ways import ALL, FEW, ONE, SESSIONS
from simulator.cluster import ClusterSpec
from simulator.records import SimResult
from simulator.setups import setup_for
from simulator.simulation import simulate
from simulator.workloads.generators import GENERATORS
from tailrace.actions import Place
from tailrace.cluster import Arrival, CachedTokens, ClusterView, InstanceState, InstanceView
from tailrace.policy.base import Policy
from tailrace.policy.deployment import Deployment
from tailrace.policy.least_loaded import LeastLoaded
from tailrace.policy.registry import load
from tailrace.profiles import load_profile

IDS = [f"i{number}" for number in range(8)]


def view(*used: int) -> ClusterView:
    """Return a view with so much KV used on each instance."""
    instances = {
        name: InstanceView(name, kv_capacity_tokens=1_000_000, kv_used_tokens=tokens)
        for name, tokens in zip(IDS, used, strict=False)
    }
    return ClusterView(MappingProxyType(instances))


def arrival(name: str, session: str = "") -> Arrival:
    return Arrival(name, 100, 1_000, 0, session_id=session)


def placed(policy: Policy, cluster: ClusterView, request: Arrival, now: float = 0.0) -> str:
    placement = policy.place(cluster, request, now)
    assert isinstance(placement, Place)
    return placement.instance_id


def divided(shards: int, drawn: int = 1) -> Sharded:
    return Sharded([LeastLoaded() for _ in range(shards)], IDS, drawn=drawn, judge=LeastLoaded())


def simulated(name: str, wrapped: bool) -> SimResult:
    setup, profile = setup_for(name), load_profile("r1-distill-qwen-32b-h100")
    policies = [setup.policy(Deployment(profile=profile)) for _ in range(2)]
    spec = setup.apply(ClusterSpec.uniform(3, profile))
    ids = [instance.instance_id for instance in spec.instances]
    policy = Sharded(policies[:1], ids, judge=policies[1]) if wrapped else policies[0]
    requests = GENERATORS["alpaca_eval"].requests(150, 10.0, 1)
    return simulate(spec, requests, policy, setup.intra(), seed=1)


@pytest.mark.parametrize("name", ["tailrace", "pascal"])
def test_one_shard_and_leases_of_one_request_are_the_policy_itself(name: str) -> None:
    plain = simulated(name, wrapped=False)
    assert plain.migrations
    assert simulated(name, wrapped=True).requests == plain.requests
    setup, profile = setup_for(name), load_profile("r1-distill-qwen-32b-h100")
    leased = Leased(setup.policy(Deployment(profile=profile)), LeaseTerms(1, 10.0), 3)
    spec = setup.apply(ClusterSpec.uniform(3, profile))
    requests = GENERATORS["alpaca_eval"].requests(150, 10.0, 1)
    assert simulate(spec, requests, leased, setup.intra(), seed=1).requests == plain.requests
    assert leased.calls == 150


@given(st.integers(1, 8), st.data())
def test_shards_divide_the_instances_evenly_and_each_request_stays_in_one(
    shards: int, data: st.DataObject
) -> None:
    used = data.draw(st.lists(st.integers(0, 900_000), min_size=8, max_size=8))
    policy, cluster = divided(shards), view(*used)
    chosen = {placed(policy, cluster, arrival(f"r{number}")) for number in range(100)}
    # A shard always takes the same instance of an unchanged view: the one with the least KV.
    parts = [IDS[number::shards] for number in range(shards)]
    assert chosen <= {placed(LeastLoaded(), _only(cluster, part), arrival("r")) for part in parts}
    if shards <= 4:
        assert len(chosen) == shards


def _only(cluster: ClusterView, names: Sequence[str]) -> ClusterView:
    return ClusterView(MappingProxyType({name: cluster.instances[name] for name in names}))


@given(st.lists(st.integers(0, 900_000), min_size=8, max_size=8))
def test_of_all_shards_asked_the_best_instance_of_the_fleet_is_taken(used: list[int]) -> None:
    cluster = view(*used)
    assert placed(divided(4, drawn=4), cluster, arrival("r")) == placed(LeastLoaded(), cluster, arrival("r"))


@given(st.lists(st.integers(0, 50), min_size=8, max_size=8))
def test_a_load_balancer_takes_the_shard_with_the_fewest_requests(running: list[int]) -> None:
    instances = {name: InstanceView(name, running=count) for name, count in zip(IDS, running, strict=True)}
    policy = Sharded([LeastLoaded(), LeastLoaded()], IDS, drawn=2)
    chosen = placed(policy, ClusterView(MappingProxyType(instances)), arrival("r"))
    even, odd = sum(running[::2]), sum(running[1::2])
    assert even == odd or (IDS.index(chosen) % 2 == 1) == (odd < even)


def test_a_session_stays_on_its_shard_and_other_requests_spread() -> None:
    policy = Sharded([LeastLoaded() for _ in range(8)], IDS, key=session_key)
    cluster = view(*[0] * 8)
    assert len({placed(policy, cluster, arrival(f"r{n}", "one session")) for n in range(20)}) == 1
    assert len({placed(policy, cluster, arrival(f"r{n}")) for n in range(100)}) == 8
    assert request_key(arrival("r", "s")) == "r"


def test_a_shard_does_not_know_what_others_have_cached() -> None:
    seen: list[Arrival] = []

    class Watching(LeastLoaded):
        def place(self, view: ClusterView, arrival: Arrival, now: float) -> Place:
            seen.append(arrival)
            return Place(min(view.instances))

    policy = Sharded([Watching(), Watching()], IDS)
    cached = {name: CachedTokens(64, 64) for name in IDS}
    policy.place(view(*[0] * 8), Arrival("r", 100, 1_000, 0, cached=cached), 0.0)
    assert len(seen) == 1 and set(seen[0].cached) in ({"i0", "i2", "i4", "i6"}, {"i1", "i3", "i5", "i7"})


@pytest.mark.parametrize(("shards", "drawn"), [(9, 1), (2, 3), (2, 0)])
def test_impossible_divisions_are_refused(shards: int, drawn: int) -> None:
    with pytest.raises(ValueError, match="shards"):
        divided(shards, drawn)


def test_policies_that_plan_from_the_cluster_s_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="statistics"):
        Sharded([load("cascade")], IDS)


def test_a_lease_is_used_up_before_the_scheduler_is_asked_again() -> None:
    policy, cluster = Leased(LeastLoaded(), LeaseTerms(4, 10.0), 1), view(*[0] * 8)
    chosen = [placed(policy, cluster, arrival(f"r{number}")) for number in range(8)]
    assert policy.calls == 2
    # Each right counts as a request that waits: the four of one lease are four instances.
    assert len(set(chosen[:4])) == len(set(chosen[4:])) == 4


def test_a_lease_expires() -> None:
    policy, cluster = Leased(LeastLoaded(), LeaseTerms(100, 1.0), 1), view(*[0] * 8)
    for number in range(10):
        policy.place(cluster, arrival(f"r{number}"), number * 0.5)
    assert policy.calls == 5


def test_unused_rights_of_a_front_end_count_when_another_asks() -> None:
    policy, cluster = Leased(LeastLoaded(), LeaseTerms(3, 10.0), 2), view(*[0] * 8)
    names = [f"r{number}" for number in range(40)]
    first, second = ([name for name in names if Random(name).randrange(2) == end][:3] for end in (0, 1))
    in_turn = [name for pair in zip(first, second, strict=True) for name in pair]
    # The view does not show placed requests, so both get the first instance for the request at hand.
    chosen = [placed(policy, cluster, arrival(name)) for name in in_turn]
    assert chosen == ["i0", "i0", "i1", "i3", "i2", "i4"]
    assert policy.calls == 2


def test_a_lease_is_not_used_for_an_instance_that_drains_or_is_excluded() -> None:
    policy, cluster = Leased(LeastLoaded(), LeaseTerms(2, 10.0), 1), view(0, 10_000)
    assert placed(policy, cluster, arrival("r0")) == "i0"
    draining = InstanceView("i0", state=InstanceState.DRAINING)
    changed = ClusterView(MappingProxyType({"i0": draining, "i1": cluster.instances["i1"]}))
    assert placed(policy, changed, arrival("r1")) == "i1" and policy.calls == 2


@pytest.mark.parametrize(("requests", "seconds"), [(0, 1.0), (1, 0.0)])
def test_a_lease_that_permits_nothing_is_refused(requests: int, seconds: float) -> None:
    with pytest.raises(ValueError, match="permits nothing"):
        LeaseTerms(requests, seconds)


def test_figures_of_a_case() -> None:
    ways = (ONE, next(way for way in ALL if way.shards == 4), next(way for way in ALL if way.terms))
    outcomes = [measure(Case("chat", "pascal", 4, 0.9, 40.0, way, 1, 3.0, 2)) for way in ways]
    one, shards, leases = outcomes
    assert one.requests == shards.requests == leases.requests > 60
    assert 0.0 < one.attained <= 1.0 and one.goodput_per_s == one.attained * 40.0
    assert one.ttft_p50_s <= one.ttft_p99_s == one.first_token_p99_s
    assert one.imbalance < shards.imbalance
    assert (one.calls, shards.calls) == (1.0, 1.0) and 0.2 <= leases.calls < 0.5
    assert groups(outcomes) == [outcomes]
    assert table(outcomes).row_count == 3
    assert change([one], [one], lambda o: o.ttft_p99_s).mean == 0.0


def test_the_imbalance_is_that_of_the_sampled_times() -> None:
    result = simulated("pascal", wrapped=False)
    assert imbalance(result.series, 0.0, 1.0) == 0.0


def test_names_of_ways_are_distinct() -> None:
    for ways in (ALL, FEW, SESSIONS):
        assert len({way.name for way in ways}) == len(ways)
