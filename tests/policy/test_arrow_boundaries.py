"""Arrow at its thresholds: values exactly at a limit and just beyond it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.actions import Action, Migrate, Place, SetPool
from tailrace.cluster import Arrival, CachedTokens, ClusterView, InstanceView, Phase, Pool, RequestView
from tailrace.policy.arrow.attainment import KvWait
from tailrace.policy.arrow.load import running_tokens
from tailrace.policy.arrow.policy import ATTAINMENT, FILTER, Arrow, DecodeCandidates
from tailrace.policy.arrow.pools import Pools
from tailrace.policy.candidates import Ledger
from tailrace.slo import DEFAULT_TPOT_S, DEFAULT_TTFT_S
from tests.policy.fleets import cluster, fleets, instance, quick, request

P, D = Pool.PREFILL, Pool.DECODE
P2D, D2P = Pool.PREFILL_TO_DECODE, Pool.DECODE_TO_PREFILL
ARROW = Arrow()
SHORT = Arrival("new", prompt_tokens=100, max_tokens=100, seq=0)


def with_delay(name: str, pool: Pool, delay_s: float, requests: int = 0) -> InstanceView:
    """Return an instance that reports this prefill delay."""
    held = tuple(request(f"{name}{n}", name) for n in range(requests))
    return replace(instance(name, held, pool=pool), prefill_delay_s=delay_s)


def with_tokens(name: str, pool: Pool, tokens: int, most: int) -> InstanceView:
    """Return an instance that runs `tokens` tokens and may run `most`."""
    held = (request(f"x{name}", name, tokens - 100, 100),) if tokens else ()
    return replace(instance(name, held, pool=pool), max_running_tokens=most)


def decode(policy: Arrow, *members: InstanceView) -> list[Action]:
    return [*policy.on_prefill_done(cluster(*members), request("r", "a"), 0.0)]


# ---- Alg. 1


def test_default_parameters() -> None:
    assert (ARROW.ttft_slo_s, ARROW.tpot_slo_s) == (DEFAULT_TTFT_S, DEFAULT_TPOT_S)
    assert (ARROW.low_load_share, ARROW.prefill_share, ARROW.tick_interval_s) == (0.5, 0.5, 0.5)
    assert not ARROW.kv_wait and not ARROW.cache_aware
    assert ARROW.loads == Arrow(profiled_context_tokens=1_024).loads
    assert ARROW.attainment == Arrow(flip_gain=0.05).attainment


@pytest.mark.parametrize("pool", [P, D2P])
def test_a_prompt_may_use_its_entire_ttft_slo(pool: Pool) -> None:
    prefiller, spare = with_delay("a", pool, 1.0), instance("d", pool=D)
    decoder = instance("c", (request("x", "c"),), pool=D)
    slo_s = 1.0 + ARROW.loads.prefill_s(prefiller, SHORT.prompt_tokens)
    view = cluster(prefiller, decoder, spare)
    assert Arrow(ttft_slo_s=slo_s).place(view, SHORT, 0.0) == Place("a")
    assert Arrow(ttft_slo_s=math.nextafter(slo_s, 0.0)).place(view, SHORT, 0.0) == Place(
        "d", (SetPool("d", P),)
    )


@pytest.mark.parametrize("pool", [P, D2P])
def test_output_tokens_of_a_resumed_request_count_as_prefill(pool: Pool) -> None:
    prefiller, spare = with_delay("a", pool, 0.0), instance("d", pool=D)
    decoder = instance("c", (request("x", "c"),), pool=D)
    view = cluster(prefiller, decoder, spare)
    slo_s = ARROW.loads.prefill_s(prefiller, 6_000)
    policy = Arrow(ttft_slo_s=slo_s)
    assert policy.place(view, replace(SHORT, output_tokens=5_900), 0.0) == Place("a")
    assert policy.place(view, replace(SHORT, output_tokens=5_901), 0.0) == Place("d", (SetPool("d", P),))


def test_equal_delays_are_decided_by_requests_then_by_name() -> None:
    first, second = with_delay("a", P, 0.5, requests=2), with_delay("b", P, 0.5, requests=1)
    assert ARROW.place(cluster(first, second, instance("d", pool=D)), SHORT, 0.0) == Place("b")
    equal = with_delay("b", P, 0.5, requests=2)
    assert ARROW.place(cluster(first, equal, instance("d", pool=D)), SHORT, 0.0) == Place("a")
    sooner = with_delay("b", P, 0.4, requests=9)
    assert ARROW.place(cluster(first, sooner, instance("d", pool=D)), SHORT, 0.0) == Place("b")


@pytest.mark.parametrize("pool", [P, D2P])
def test_no_flip_for_a_late_prompt_while_decode_instances_are_busy(pool: Pool) -> None:
    busy = [with_tokens(name, D, 30_000, 40_000) for name in "cd"]
    assert ARROW.place(cluster(with_delay("a", pool, 60.0), *busy), SHORT, 0.0) == Place("a")


@pytest.mark.parametrize(("tokens", "flips"), [(2_500, True), (2_501, False)])
def test_decode_load_is_low_up_to_the_share(tokens: int, flips: bool) -> None:
    """The tokens of both instances are compared with the share of the remaining one: 5,000 of 10,000."""
    view = cluster(
        with_delay("a", P, 60.0), with_tokens("c", D, 2_500, 10_000), with_tokens("d", D, tokens, 10_000)
    )
    expected = Place("c", (SetPool("c", D2P),)) if flips else Place("a")
    assert ARROW.place(view, SHORT, 0.0) == expected


@pytest.mark.parametrize(("interval_s", "flips"), [(0.15, True), (0.1501, False)])
def test_decode_load_is_low_up_to_the_tpot_slo(interval_s: float, flips: bool) -> None:
    decoders = [
        replace(instance(name, (request(f"x{name}", name),), pool=D), token_interval_s=interval_s)
        for name in "cd"
    ]
    placement = ARROW.place(cluster(with_delay("a", P, 60.0), *decoders), SHORT, 0.0)
    assert placement == (Place("c", (SetPool("c", D2P),)) if flips else Place("a"))


def test_instances_with_zero_token_limit_are_never_flipped() -> None:
    view = cluster(with_delay("a", P, 60.0), with_tokens("c", D, 0, 0), with_tokens("d", D, 0, 0))
    assert ARROW.place(view, SHORT, 0.0) == Place("a")


@pytest.mark.parametrize(("tokens", "flips"), [(100, True), (120_000, False)])
def test_attainment_flips_for_an_arrival_only_if_it_meets_its_slo(tokens: int, flips: bool) -> None:
    view = cluster(
        with_delay("a", P, 60.0), instance("c", (request("x", "c"),), pool=D), instance("d", pool=D)
    )
    placement = Arrow(flips=ATTAINMENT).place(view, replace(SHORT, prompt_tokens=tokens), 0.0)
    assert placement == (Place("d", (SetPool("d", P),)) if flips else Place("a"))


@pytest.mark.parametrize(("interval_s", "flips"), [(10.0, True), (0.1501, False)])
def test_attainment_flips_for_decoding_only_for_enough_gain(interval_s: float, flips: bool) -> None:
    """An instance with a hundred requests is slightly too slow: a second one gains less than one request."""
    policy = Arrow(flips=ATTAINMENT)
    running = tuple(request(f"x{n}", "c") for n in range(100))
    slow = replace(
        instance("c", running, pool=D, capacity=4_000_000),
        token_interval_s=interval_s,
        max_running_tokens=1_000_000,
    )
    source = instance("a", (request("r", "a"),), pool=P)
    actions = decode(policy, source, slow, instance("e", pool=P))
    move = SetPool("e", D)
    assert actions == [*([move] if flips else []), Migrate("r", "a", "e" if flips else "c", "prefill done")]


def test_the_longer_of_kv_wait_and_queue_counts() -> None:
    held = tuple(replace(request(f"a{n}", "a", 500, 500), kv_tokens=1_000) for n in range(4))
    full = replace(instance("a", held, pool=P, capacity=4_000), kv_used_tokens=4_000, token_interval_s=0.01)
    decoders = tuple(replace(request(f"c{n}", "c", 500, 500), kv_tokens=1_000) for n in range(8))
    others = replace(
        instance("c", decoders, pool=D, capacity=8_000), kv_used_tokens=8_000, token_interval_s=0.01
    )
    prompt = replace(SHORT, prompt_tokens=1_000)
    wait_s = KvWait(Pools.of(cluster(full, others)), ARROW.tpot_slo_s).wait_s(full, 1_000)
    assert wait_s > 0.0
    policy = Arrow(kv_wait=True)
    for queue_s, chosen in ((wait_s * 0.9, "b"), (wait_s * 1.1, "a")):
        view = cluster(full, with_delay("b", P, queue_s), others)
        assert policy.place(view, prompt, 0.0) == Place(chosen)
    # Here the queue is longer.
    view = cluster(replace(full, prefill_delay_s=wait_s * 2), with_delay("b", P, wait_s * 1.5), others)
    assert policy.place(view, prompt, 0.0) == Place("b")


def test_cached_tokens_reduce_the_delay_if_cache_aware() -> None:
    policy = Arrow(cache_aware=True)
    prompt = replace(SHORT, prompt_tokens=8_000)
    holder, other = with_delay("b", P, 1.0), with_delay("a", P, 0.0)
    saved_s = policy.loads.saved_s(holder, 6_000)
    with_cached = replace(prompt, cached={"b": CachedTokens(6_000, 6_000)})
    decoder = instance("d", pool=D)
    near = replace(holder, prefill_delay_s=saved_s * 0.9)
    assert policy.place(cluster(other, near, decoder), with_cached, 0.0) == Place("b")
    far = replace(holder, prefill_delay_s=saved_s * 1.1)
    assert policy.place(cluster(other, far, decoder), with_cached, 0.0) == Place("a")
    assert ARROW.place(cluster(other, near, decoder), with_cached, 0.0) == Place("a")


# ---- Alg. 2


@pytest.mark.parametrize(("most", "target"), [(5_000, "c"), (4_999, "d")])
def test_a_decode_instance_is_chosen_up_to_its_running_tokens(most: int, target: str) -> None:
    source = instance("a", (request("r", "a"),), pool=P)
    members = with_tokens("c", D, 5_000, most), with_tokens("d", P2D, 9_000, 100_000)
    assert decode(ARROW, source, *members) == [Migrate("r", "a", target, "prefill done")]


@pytest.mark.parametrize(("interval_s", "target"), [(0.15, "c"), (0.1501, "d")])
def test_a_decode_instance_is_chosen_up_to_the_tpot_slo(interval_s: float, target: str) -> None:
    source = instance("a", (request("r", "a"),), pool=P)
    first = replace(with_tokens("c", D, 5_000, 100_000), token_interval_s=interval_s)
    second = with_tokens("d", P2D, 9_000, 100_000)
    assert decode(ARROW, source, first, second) == [Migrate("r", "a", target, "prefill done")]


@pytest.mark.parametrize(("tokens", "target"), [(5_000, "c"), (4_999, "d")])
def test_with_all_over_their_limits_a_tie_goes_to_the_decode_pool(tokens: int, target: str) -> None:
    source = instance("a", (request("r", "a"),), pool=P)
    members = with_tokens("c", D, 5_000, 1_000), with_tokens("d", P2D, tokens, 1_000)
    assert decode(ARROW, source, *members) == [Migrate("r", "a", target, "prefill done")]


def test_with_a_single_pool_over_its_limits_that_pool_is_used() -> None:
    source = instance("a", (request("r", "a"),), pool=P)
    for pool in (D, P2D):
        expected = [Migrate("r", "a", "c", "prefill done")]
        assert decode(ARROW, source, with_tokens("c", pool, 5_000, 1_000)) == expected


def test_a_request_that_does_not_fit_the_flipped_instance_goes_elsewhere() -> None:
    source = instance("a", (request("r", "a"), request("s", "a")), pool=P)
    slow = replace(with_tokens("c", D, 5_000, 100_000), token_interval_s=0.2)
    small = instance("e", pool=P, capacity=160)
    assert decode(ARROW, source, slow, small) == [
        SetPool("e", D),
        Migrate("r", "a", "c", "prefill done"),
    ]


def test_earlier_requests_of_a_tick_count_as_load_for_later_ones() -> None:
    waiting = tuple(replace(request(f"r{n}", "a"), arrival_s=float(n)) for n in range(3))
    source = instance("a", waiting, pool=P)
    targets = with_tokens("c", D, 1_000, 100_000), with_tokens("d", D, 1_500, 100_000)
    moves = [a for a in ARROW.on_tick(cluster(source, *targets), 0.0) if isinstance(a, Migrate)]
    assert [(m.request_id, m.target_id) for m in moves] == [("r0", "c"), ("r1", "d"), ("r2", "c")]


# ---- section 5.5


def test_a_tick_places_the_oldest_64_waiting_requests() -> None:
    waiting = tuple(replace(request(f"r{n:02}", "a"), arrival_s=100.0 - n) for n in range(70))
    view = cluster(instance("a", waiting, pool=P, capacity=10_000_000), instance("c", pool=D))
    moves = [a for a in ARROW.on_tick(view, 0.0) if isinstance(a, Migrate)]
    assert [m.request_id for m in moves] == [f"r{n:02}" for n in range(69, 5, -1)]


def test_prompts_and_migrating_requests_are_not_handed_over() -> None:
    held: tuple[RequestView, ...] = (
        request("p", "a", phase=Phase.PREFILL),
        request("m", "a", migrating=True),
        request("r", "a"),
    )
    view = cluster(
        instance("a", held, pool=P), instance("b", (request("s", "b"),), pool=D2P), instance("c", pool=D)
    )
    moves = [a for a in ARROW.on_tick(view, 0.0) if isinstance(a, Migrate)]
    assert [m.request_id for m in moves] == ["r"]
    assert not [
        a
        for a in Arrow(room=FILTER).on_tick(
            cluster(instance("a", held[:2], pool=P), instance("c", pool=D)), 0.0
        )
        if isinstance(a, Migrate)
    ]


@pytest.mark.parametrize(("interval_s", "flips"), [(0.15, False), (0.1501, True)])
def test_a_tick_flips_for_decoding_beyond_the_tpot_slo(interval_s: float, flips: bool) -> None:
    slow = replace(with_tokens("c", D, 5_000, 100_000), token_interval_s=interval_s)
    prompts = tuple(request(f"q{n}", "a", phase=Phase.PREFILL) for n in range(3))
    view = cluster(instance("a", prompts, pool=P), instance("b", prompts[:1], pool=P), slow)
    assert list(ARROW.on_tick(view, 0.0)) == ([SetPool("b", P2D)] if flips else [])


@pytest.mark.parametrize(("tokens", "flips"), [(5_000, False), (5_001, True)])
def test_decode_instances_are_busy_beyond_the_low_load_share(tokens: int, flips: bool) -> None:
    view = cluster(instance("a", pool=P), instance("b", pool=P), with_tokens("c", D, tokens, 10_000))
    assert list(ARROW.on_tick(view, 0.0)) == ([SetPool("a", D)] if flips else [])


@quick
@given(
    view=fleets(pools=(Pool.PREFILL, Pool.DECODE, Pool.PREFILL_TO_DECODE)),
    needs_room=st.booleans(),
)
def test_on_a_tick_each_handover_goes_where_a_comparison_of_all_instances_says(
    view: ClusterView, needs_room: bool
) -> None:
    pools, ledger = Pools.of(view), Ledger(view.instances, None, None)
    eligible = ledger.may_receive if needs_room else ledger.may_queue
    among = DecodeCandidates(pools, ledger, eligible)
    waiting = [held for source in pools.prefill for held in source.requests]
    for held in waiting:
        for heap, members in (
            (among.decode, pools.decode),
            (among.prefill_to_decode, pools.prefill_to_decode),
        ):
            able = [i for i in members if eligible(i, held)]
            expected = min(
                able,
                key=lambda i: (running_tokens(i) + ledger.reserved_tokens(i), i.instance_id),
                default=None,
            )
            found = heap.least(held)
            assert found is expected
            if found is not None:
                ledger.reserve(held, found, "prefill done")
