"""Contestants from published ideas: sound decisions, and the rules that their docstrings state."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.contestants.__main__ import CONTESTANTS
from experiments.contestants.chunk_sizes import LARGE, SMALL, ChunkSizes, with_chunks
from experiments.contestants.token_velocity import TokenVelocity
from simulator.cluster import ClusterSpec
from simulator.request import SimRequest
from simulator.setups import setup_for
from simulator.simulation import simulate
from tailrace.actions import Migrate, Place, Refuse, SetPool
from tailrace.cluster import Arrival, ClusterView, InstanceState, Pool
from tailrace.lengths import LengthStatistics
from tailrace.policy.base import Policy
from tailrace.policy.deployment import Deployment
from tailrace.profiles import load_profile
from tests.policy.fleets import arrivals, cluster, fleets, instance, quick, request

P, D = Pool.PREFILL, Pool.DECODE
PROFILE = load_profile("llama-3.1-8b-h100")
PLAIN = (None, P, D)


@pytest.mark.parametrize("policy", [TokenVelocity(), ChunkSizes()], ids=lambda p: type(p).__name__)
@quick
@given(view=fleets(pools=PLAIN), arrival=arrivals)
def test_an_arrival_goes_to_an_active_instance_unless_there_is_none(
    policy: Policy, view: ClusterView, arrival: Arrival
) -> None:
    placed = policy.place(view, arrival, 0.0)
    usable = {i.instance_id for i in view.placeable()} - arrival.excluded
    if isinstance(placed, Refuse):
        assert not usable
    else:
        assert placed.instance_id in usable


@pytest.mark.parametrize("policy", [TokenVelocity(), ChunkSizes()], ids=lambda p: type(p).__name__)
@quick
@given(view=fleets(pools=PLAIN))
def test_a_prefilled_request_moves_to_another_active_instance(policy: Policy, view: ClusterView) -> None:
    for member in view.instances.values():
        for one in member.requests:
            for action in policy.on_prefill_done(view, one, 0.0):
                assert isinstance(action, Migrate) and action.target_id != member.instance_id
                assert view.instances[action.target_id].state is InstanceState.ACTIVE


# ---- token velocity


def _arrived(*prompts: int, outputs: int = 100, seconds: float = 5.0) -> LengthStatistics:
    return LengthStatistics.of(seconds, prompts, [(prompt, outputs) for prompt in prompts])


def test_prefillers_are_the_input_tokens_over_their_velocity() -> None:
    policy = TokenVelocity(profile=PROFILE)
    # In five seconds, prompts that take one instance seven.
    one_s = (PROFILE.prefill.base_ms + PROFILE.prefill.ms(0, 2_000)) / 1e3
    lengths = _arrived(*[2_000] * round(7.0 / one_s), outputs=1)
    prefill, decode = policy.needed(lengths)
    assert prefill == pytest.approx(1.4, rel=0.01) and decode < 0.1
    assert policy.prefillers(lengths, 8) == 2
    # Twice the requests need twice the instances of either kind.
    double = _arrived(*[2_000] * 2 * round(7.0 / one_s), outputs=1)
    assert policy.needed(double) == pytest.approx((2 * prefill, 2 * decode))


@quick
@given(
    prompts=st.lists(st.integers(1, 8_000), max_size=40),
    outputs=st.integers(1, 2_000),
    instances=st.integers(2, 16),
)
def test_both_pools_keep_an_instance(prompts: list[int], outputs: int, instances: int) -> None:
    policy = TokenVelocity(profile=PROFILE)
    lengths = _arrived(*prompts, outputs=outputs, seconds=1.0)
    prefill, decode = policy.needed(lengths)
    assert np.isfinite(prefill) and prefill >= 0.0 and np.isfinite(decode) and decode >= 0.0
    assert 1 <= policy.prefillers(lengths, instances) <= instances - 1


def test_one_instance_a_tick_moves_to_the_pool_that_is_short() -> None:
    policy = TokenVelocity(profile=PROFILE)
    members = (
        instance("a", pool=P),
        instance("b", (request("x", "b"),), pool=D),
        instance("c", pool=D),
        instance("d", (request("y", "d"),), pool=D),
    )
    one_s = (PROFILE.prefill.base_ms + PROFILE.prefill.ms(0, 2_000)) / 1e3
    busy = replace(cluster(*members), lengths=_arrived(*[2_000] * round(10.0 / one_s), outputs=1))
    assert [*policy.on_tick(busy, 0.0)][:1] == [SetPool("c", P)]
    calm = replace(cluster(members[0], instance("e", pool=P), *members[1:]), lengths=_arrived(100, outputs=1))
    assert [*policy.on_tick(calm, 0.0)][:1] == [SetPool("a", D)]
    assert not [*policy.on_tick(replace(calm, lengths=None), 0.0)]


def test_a_decoder_prefills_what_no_prefiller_could_in_time() -> None:
    policy = TokenVelocity(ttft_slo_s=2.0, profile=PROFILE)
    late = replace(instance("a", pool=P), prefill_delay_s=5.0)
    idle = replace(instance("b", pool=D), prefill_delay_s=0.0)
    arrival = Arrival("x", 1_000, 10)
    assert policy.place(cluster(late, idle), arrival, 0.0) == Place("b")
    assert policy.place(cluster(replace(late, prefill_delay_s=1.0), idle), arrival, 0.0) == Place("a")
    assert policy.place(cluster(late, replace(idle, prefill_delay_s=9.0)), arrival, 0.0) == Place("a")


# ---- chunk sizes


def test_a_short_prompt_takes_the_slow_instance_and_a_long_one_the_fast() -> None:
    policy = ChunkSizes(ttft_slo_s=0.5, profile=PROFILE)
    view = cluster(instance("a", pool=P), instance("b", pool=D))
    assert policy.place(view, Arrival("x", 500, 10), 0.0) == Place("b")
    assert policy.place(view, Arrival("x", 30_000, 10), 0.0) == Place("a")


def test_a_request_leaves_a_fast_instance_only_if_its_tokens_come_late() -> None:
    policy = ChunkSizes(tpot_slo_s=0.1, profile=PROFILE)
    one = request("r", "a")
    for interval_s, expected in ((0.05, []), (0.2, [Migrate("r", "a", "b", "prefill done")])):
        source = instance("a", (one,), pool=P, token_interval_s=interval_s)
        assert [*policy.on_prefill_done(cluster(source, instance("b", pool=D)), one, 0.0)] == expected


@pytest.mark.parametrize("name", [name for name in CONTESTANTS if ":" in name])
def test_every_request_is_served(name: str) -> None:
    setup = setup_for(name)
    spec = setup.apply(ClusterSpec.uniform(4, PROFILE, kv_capacity_tokens=20_000))
    if setup.kind is ChunkSizes:
        spec = with_chunks(spec)
        assert [i.chunk_budget_tokens for i in spec.instances] == [LARGE, LARGE, SMALL, SMALL]
    requests = [SimRequest(f"r{n}", 0.02 * n, 200 + 37 * n % 3_000, 0, 20 + n % 90) for n in range(200)]
    done = simulate(spec, requests, setup.policy(Deployment(profile=PROFILE)), setup.intra()).requests
    assert all(r.finish_s is not None and not r.refused for r in done)
