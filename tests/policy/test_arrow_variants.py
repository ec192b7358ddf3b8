"""KV wait in Arrow's TTFT prediction, and flips by predicted attainment."""

from __future__ import annotations

import math
from dataclasses import replace
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.actions import Action, Place, SetPool
from tailrace.cluster import Arrival, ClusterView, InstanceView, Phase, Pool
from tailrace.policy.arrow.attainment import AttainmentModel, KvWait
from tailrace.policy.arrow.policy import ATTAINMENT, Arrow
from tailrace.policy.arrow.pools import Pools
from tests.policy.fleets import arrivals, cluster, fleets, instance, quick, request

P, D = Pool.PREFILL, Pool.DECODE
GAIN = 0.05
ARROW = Arrow(kv_wait=True, flips=ATTAINMENT, flip_gain=GAIN)
SHORT = Arrival("new", prompt_tokens=100, max_tokens=100, seq=0)


def apply_moves(view: ClusterView, actions: list[Action]) -> ClusterView:
    """Return the view after the pool changes."""
    members = dict(view.instances)
    for action in actions:
        if isinstance(action, SetPool):
            members[action.instance_id] = replace(members[action.instance_id], pool=action.pool)
    return ClusterView(MappingProxyType(members), view.stages)


# ---- waiting for KV


def full(name: str, pool: Pool, requests: int, interval_s: float = 0.01) -> InstanceView:
    """Return an instance whose KV is full of requests of 1,000 tokens, 500 of them generated here."""
    held = tuple(replace(request(f"{name}{n}", name, 500, 500), kv_tokens=1_000) for n in range(requests))
    return replace(
        instance(name, held, pool=pool, capacity=1_000 * requests),
        kv_used_tokens=1_000 * requests,
        token_interval_s=interval_s,
    )


def test_there_is_no_wait_for_kv_with_free_room() -> None:
    roomy = instance("a", (request("r", "a"),), pool=P)
    assert KvWait(Pools.of(cluster(roomy, instance("b", pool=D))), 0.1).wait_s(roomy, 10_000) == 0.0


def test_handovers_to_a_decode_instance_with_room_free_kv_at_once() -> None:
    source = full("a", P, 4)
    pools = Pools.of(cluster(source, instance("b", pool=D)))
    assert KvWait(pools, 0.1).wait_s(source, 3_000) == 0.0
    # More than the handovers free: the rest has to wait for requests to finish.
    assert KvWait(pools, 0.1).wait_s(source, 5_000) > 0.0


def test_without_room_the_wait_is_until_enough_requests_finish() -> None:
    """Requests are expected to generate 500 more tokens: as many as they have so far."""
    source, decoder = full("a", P, 4), full("b", D, 8)
    pools = Pools.of(cluster(source, decoder))
    # 12,000 tokens of KV are freed in 500 steps of 10 ms, on both instances together.
    assert KvWait(pools, 0.1).wait_s(source, 2_400) == pytest.approx(1.0)
    # Two sources share what the decode instances free.
    other = full("c", P, 4)
    pools = Pools.of(cluster(source, decoder, other))
    assert KvWait(pools, 0.1).wait_s(source, 1_600) == pytest.approx(1.0)
    predicted = replace(
        decoder, requests=tuple(replace(r, predicted_remaining_tokens=50.0) for r in decoder.requests)
    )
    assert KvWait(Pools.of(cluster(source, predicted)), 0.1).wait_s(source, 2_400) == pytest.approx(0.1)


@quick
@given(st.floats(0.0, 5.0))
def test_a_request_has_at_least_one_token_left(predicted_tokens: float) -> None:
    source, decoder = full("a", P, 4), full("b", D, 8)
    ending = tuple(replace(r, predicted_remaining_tokens=predicted_tokens) for r in decoder.requests)
    pools = Pools.of(cluster(source, replace(decoder, requests=ending)))
    # A fifth of 12,000 tokens of KV, all of which is freed in that many steps of 10 ms.
    assert KvWait(pools, 0.1).wait_s(source, 2_400) == pytest.approx(0.002 * max(1.0, predicted_tokens))


@pytest.mark.parametrize("tokens", [1, 2, 3_999, 4_000])
def test_handovers_cover_a_shortage_up_to_what_they_free(tokens: int) -> None:
    source = full("a", P, 4)
    pools = Pools.of(cluster(source, instance("b", pool=D)))
    assert KvWait(pools, 0.1).wait_s(source, tokens) == 0.0


def test_the_wait_for_kv_that_is_never_freed_is_infinite() -> None:
    held = instance("a", pool=P, capacity=100)
    assert KvWait(Pools.of(cluster(held)), 0.1).wait_s(held, 200) == math.inf


def test_a_prompt_that_fits_exactly_does_not_wait() -> None:
    empty = instance("a", pool=P, capacity=1_000)
    wait = KvWait(Pools.of(cluster(empty)), 0.1)
    assert (wait.wait_s(empty, 1_000), wait.wait_s(empty, 1_001)) == (0.0, math.inf)
    # The prefill backlog is served first.
    with_backlog = replace(empty, prefill_backlog_tokens=300)
    assert (wait.wait_s(with_backlog, 700), wait.wait_s(with_backlog, 701)) == (0.0, math.inf)
    # Without a token interval, only handovers to decode instances free KV.
    source = full("a", P, 4, interval_s=0.0)
    wait = KvWait(Pools.of(cluster(source, instance("b", pool=D))), 0.0)
    assert (wait.wait_s(source, 4_000), wait.wait_s(source, 4_001)) == (0.0, math.inf)


def test_an_instance_without_a_token_interval_gets_the_default() -> None:
    source = full("a", P, 4, interval_s=0.0)
    pools = Pools.of(cluster(source, full("b", D, 8, interval_s=0.0)))
    assert KvWait(pools, 0.01).wait_s(source, 2_400) == pytest.approx(1.0)


def test_without_decode_capacity_requests_are_assumed_to_end_with_their_next_token() -> None:
    source = full("a", P, 4)
    wait = KvWait(Pools.of(cluster(source, instance("b", pool=D, capacity=0))), 0.1)
    assert wait.wait_s(source, 2_000) == pytest.approx(0.005)


def test_on_a_decode_instance_only_its_own_requests_free_kv() -> None:
    decoder = full("b", D, 8)
    pools = Pools.of(cluster(decoder, full("c", D, 2)))
    # 8,000 tokens of KV are freed in 500 steps of 10 ms.
    assert KvWait(pools, 0.1).wait_s(decoder, 800) == pytest.approx(0.5)


@quick
@given(fleets(pools=tuple(Pool)), st.integers(1, 50_000), st.integers(0, 50_000))
def test_the_wait_for_kv_never_decreases_with_length(view: ClusterView, tokens: int, more: int) -> None:
    pools = Pools.of(view)
    wait = KvWait(pools, 0.1)
    for member in pools.members():
        assert 0.0 <= wait.wait_s(member, tokens) <= wait.wait_s(member, tokens + more)


def test_a_prompt_avoids_an_instance_short_of_kv() -> None:
    view = cluster(
        full("a", P, 4, interval_s=1.0),
        instance("b", (request("q", "b", 20_000, phase=Phase.PREFILL),), pool=P),
        full("c", D, 8, interval_s=1.0),
    )
    assert Arrow().place(view, SHORT, 0.0) == Place("a")
    assert Arrow(kv_wait=True).place(view, SHORT, 0.0) == Place("b")


# ---- flips by predicted attainment


def flips_of(view: ClusterView, now: float) -> list[SetPool]:
    """Return the pool changes of a tick; there is no upkeep, since all pools are settled."""
    return [action for action in ARROW.on_tick(view, now) if isinstance(action, SetPool)]


@quick
@given(view=fleets(least=2, pools=tuple(Pool), all_active=True))
def test_on_unchanged_loads_flips_terminate_and_none_is_reverted(view: ClusterView) -> None:
    """The hysteresis bound: each flip gains the share GAIN of the requests, and at least one."""
    model: AttainmentModel = ARROW.attainment
    # Upkeep follows other rules and comes first.
    for _ in range(2 * len(view.instances)):
        view = apply_moves(view, [*ARROW.on_tick(view, 0.0)])
    demand = model.demand(Pools.of(view), 0.0)
    max_changes = 1 + min(1.0 / GAIN, demand.requests)
    seen = [{i.instance_id: i.pool for i in view.instances.values()}]
    changes = 0
    for _ in range(50):
        actions = flips_of(view, 0.0)
        if not actions:
            break
        view = apply_moves(view, [*actions])
        layout = {i.instance_id: i.pool for i in view.instances.values()}
        assert layout not in seen
        seen.append(layout)
        changes += 1
    assert not flips_of(view, 0.0)
    assert changes <= max_changes


@quick
@given(
    view=fleets(least=2, pools=tuple(Pool), all_active=True),
    arrivals=st.lists(arrivals, max_size=5),
    turns=st.lists(st.booleans(), max_size=8),
)
def test_both_kinds_survive_arrivals_and_ticks_with_attainment(
    view: ClusterView, arrivals: list[Arrival], turns: list[bool]
) -> None:
    view = apply_moves(view, [*ARROW.on_tick(view, 0.0)])
    pending = list(arrivals)
    for tick in turns:
        actions: list[Action] = []
        if tick or not pending:
            actions = [*ARROW.on_tick(view, 0.0)]
        else:
            placement = ARROW.place(view, replace(pending.pop(), excluded=frozenset()), 0.0)
            if isinstance(placement, Place):
                actions = [*placement.also]
        view = apply_moves(view, actions)
        pools = Pools.of(view)
        assert pools.able_to_prefill > 0 and pools.able_to_decode > 0


@quick
@given(view=fleets(least=2, pools=(P, D), all_active=True), arrival=arrivals)
def test_a_flip_for_an_arrival_is_not_reverted_at_the_next_tick(view: ClusterView, arrival: Arrival) -> None:
    """By then, the arrival is a prompt of the flipped instance.

    An arrival that takes all of the TTFT SLO leaves no time for others there, so that the instance may be on
    its way back by then; it finishes the prompt first.
    """
    placement = ARROW.place(view, replace(arrival, excluded=frozenset()), 0.0)
    if not isinstance(placement, Place) or not placement.also:
        return
    after = apply_moves(view, [*placement.also])
    chosen = after.instances[placement.instance_id]
    prompt = replace(
        request("new", chosen.instance_id, arrival.prompt_tokens, phase=Phase.PREFILL),
        prompt_tokens=arrival.prompt_tokens + arrival.output_tokens,
    )
    loaded = replace(
        chosen,
        requests=(*chosen.requests, prompt),
        waiting=chosen.waiting + 1,
        prefill_backlog_tokens=chosen.prefill_backlog_tokens + prompt.prompt_tokens,
        context_tokens=chosen.context_tokens + prompt.prompt_tokens,
    )
    view = ClusterView(MappingProxyType({**after.instances, loaded.instance_id: loaded}))
    flips = flips_of(view, 0.0)
    assert SetPool(loaded.instance_id, D) not in flips
    if ARROW.loads.prefill_s(chosen, 2 * prompt.prompt_tokens) <= ARROW.ttft_slo_s:
        assert SetPool(loaded.instance_id, Pool.PREFILL_TO_DECODE) not in flips


def test_a_shortage_of_kv_among_decoders_flips_a_prefill_instance() -> None:
    view = cluster(
        instance("a", pool=P), instance("b", pool=P), replace(full("c", D, 40), context_tokens=80_000)
    )
    assert flips_of(view, 0.0) == [SetPool("a", D)]


def test_late_prompts_flip_a_spare_decode_instance() -> None:
    prompts = tuple(
        replace(request(f"p{n}", "a", 30_000, phase=Phase.PREFILL), arrival_s=9.5) for n in range(12)
    )
    view = cluster(
        instance("a", prompts, pool=P), instance("c", (request("x", "c"),), pool=D), instance("d", pool=D)
    )
    assert flips_of(view, 10.0) == [SetPool("d", P)]
    # If the decode instances are all needed, a flip would make more requests late than it saves.
    needed = [replace(full(name, D, 400), token_interval_s=0.2) for name in "cd"]
    assert flips_of(cluster(view.instances["a"], *needed), 10.0) == []


def test_a_gain_of_one_request_suffices_for_a_flip() -> None:
    prompt = replace(request("p", "a", 30_000, phase=Phase.PREFILL), arrival_s=9.5)
    view = cluster(instance("a", (prompt,), pool=P), instance("c", pool=D), instance("d", pool=D))
    # On its present instance the request counts as backlog before itself; on a free one it is in time.
    alone_s = ARROW.loads.prefill_s(view.instances["c"], 30_000)
    for share, flips in ((0.9, []), (1.5, [SetPool("c", P)]), (2.1, [])):
        policy = Arrow(flips=ATTAINMENT, flip_gain=GAIN, ttft_slo_s=share * alone_s)
        assert list(policy.on_tick(view, 9.5)) == flips


def test_prefill_instances_return_after_a_burst_of_decoding() -> None:
    """Instances that were flipped for decoding are flipped back for prompts once the burst is over."""
    prompts = tuple(
        replace(request(f"p{n}", "a", 30_000, phase=Phase.PREFILL), arrival_s=9.5) for n in range(12)
    )
    ended = cluster(instance("a", prompts, pool=P), instance("b", pool=D), instance("c", pool=D))
    assert flips_of(ended, 10.0) == [SetPool("b", P)]
