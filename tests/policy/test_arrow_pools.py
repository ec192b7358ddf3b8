"""Elastic pools partition the instances, keep at least one of each kind, and flip without waiting."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.actions import Action, Migrate, Place, SetPool
from tailrace.cluster import Arrival, ClusterView, InstanceState, InstanceView, Phase, Pool, RequestView
from tailrace.policy.arrow.load import (
    has_decodes_left,
    has_prefills_left,
    mean_token_interval_s,
    running_tokens,
)
from tailrace.policy.arrow.policy import DECODING, FILTER, Arrow
from tailrace.policy.arrow.pools import (
    Pools,
    assign,
    repair,
    settle,
    try_move_decode_to_prefill,
    try_move_idle_to_decode,
    try_move_prefill_to_decode,
)
from tailrace.policy.static_pools import ROUND_ROBIN, StaticPools
from tests.policy.fleets import arrivals, cluster, fleets, instance, quick, request

ARROW = Arrow()
P, D = Pool.PREFILL, Pool.DECODE
P2D, D2P = Pool.PREFILL_TO_DECODE, Pool.DECODE_TO_PREFILL
ANY = (None, *Pool)


def apply_moves(view: ClusterView, actions: tuple[Action, ...] | list[Action]) -> ClusterView:
    """Return the view after the pool changes."""
    members = dict(view.instances)
    for action in actions:
        if isinstance(action, SetPool):
            members[action.instance_id] = replace(members[action.instance_id], pool=action.pool)
    return ClusterView(MappingProxyType(members), view.stages)


def both_able(pools: Pools) -> bool:
    return pools.able_to_prefill > 0 and pools.able_to_decode > 0


@quick
@given(fleets(pools=ANY))
def test_pools_partition_the_active_instances(view: ClusterView) -> None:
    pools = Pools.of(view)
    names = [i.instance_id for i in pools.members()]
    assert sorted(names) == [i.instance_id for i in view.placeable()]
    assert len(set(names)) == len(names)
    for member in pools.members():
        for pool in ANY:
            after = Pools.of(apply_moves(view, [SetPool(member.instance_id, pool)]))
            assert pools.after(SetPool(member.instance_id, pool)) == after


@quick
@given(fleets(pools=ANY))
def test_flips_take_the_least_loaded_and_never_the_last(view: ClusterView) -> None:
    """Alg. 3 and 4."""
    pools = Pools.of(view)
    to_prefill = try_move_decode_to_prefill(pools)
    if to_prefill is not None:
        assert both_able(pools.after(to_prefill))
        chosen = view.instances[to_prefill.instance_id]
        assert chosen.pool is (P2D if pools.prefill_to_decode else D)
        peers = pools.prefill_to_decode or pools.decode
        assert running_tokens(chosen) == min(map(running_tokens, peers))
        assert to_prefill.pool is (D2P if has_decodes_left(chosen) else P)
    else:
        assert pools.able_to_decode <= 1 or not (pools.decode or pools.prefill_to_decode)
    to_decode = try_move_prefill_to_decode(pools, ARROW.loads)
    if to_decode is not None:
        assert both_able(pools.after(to_decode))
        chosen = view.instances[to_decode.instance_id]
        assert chosen.pool is (D2P if pools.decode_to_prefill else P)
        peers = pools.decode_to_prefill or pools.prefill
        delay_s = ARROW.loads.prefill_delay_s
        assert delay_s(chosen) == min(map(delay_s, peers))
        assert to_decode.pool is (P2D if has_prefills_left(chosen) else D)
    else:
        assert pools.able_to_prefill <= 1 or not (pools.prefill or pools.decode_to_prefill)


@quick
@given(fleets(pools=ANY))
def test_upkeep_preserves_both_kinds(view: ClusterView) -> None:
    pools = Pools.of(view)
    before = both_able(pools)
    for move in (*assign(pools, 0.5), *settle(pools)):
        pools = pools.after(move)
    assert both_able(pools) or not before
    if len(list(pools.members())) > 1:
        mend = repair(pools, ARROW.loads)
        assert both_able(pools.after(mend) if mend is not None else pools)
        assert not pools.unpooled


@quick
@given(fleets(pools=ANY))
def test_intact_pools_are_not_repaired(view: ClusterView) -> None:
    pools = Pools.of(view)
    if both_able(pools):
        assert repair(pools, ARROW.loads) is None


@quick
@given(
    view=fleets(least=2, pools=(None,), all_active=True),
    share=st.floats(0.01, 0.99),
)
def test_assignment_follows_the_prefill_share(view: ClusterView, share: float) -> None:
    total = len(view.instances)
    after = Pools.of(apply_moves(view, [*assign(Pools.of(view), share)]))
    assert not after.unpooled
    assert after.able_to_prefill == min(total - 1, max(1, round(total * share)))


@quick
@given(
    view=fleets(least=2, pools=tuple(Pool), all_active=True),
    arrivals=st.lists(arrivals, max_size=5),
    turns=st.lists(st.booleans(), max_size=8),
)
def test_both_kinds_survive_arrivals_and_ticks(
    view: ClusterView, arrivals: list[Arrival], turns: list[bool]
) -> None:
    """Arrivals and ticks come in any order, on a cluster with intact pools."""
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
        assert both_able(Pools.of(view))


def test_only_an_idle_prefill_instance_is_added_to_decode() -> None:
    """An instance is not idle if a request waits for room elsewhere or a prompt was just placed there."""
    waiting = with_phases("a", P, Phase.ANSWERING)
    placed = replace(instance("b", pool=P), prefill_backlog_tokens=100)
    others = (instance("c", pool=D),)
    assert try_move_idle_to_decode(Pools.of(cluster(waiting, placed, *others))) is None
    idle = instance("e", pool=P)
    assert try_move_idle_to_decode(Pools.of(cluster(waiting, placed, idle, *others))) == SetPool("e", D)


# ---- the transition diagram (Figure 5), edge by edge


def with_phases(name: str, pool: Pool, *phases: Phase) -> InstanceView:
    held = tuple(request(f"{name}{n}", name, phase=phase) for n, phase in enumerate(phases))
    return instance(name, held, pool=pool)


@pytest.mark.parametrize(
    ("start", "phases", "end"),
    [
        (D, (), P),
        (D, (Phase.ANSWERING,), D2P),
        (P2D, (Phase.PREFILL,), P),
        (P2D, (Phase.PREFILL, Phase.ANSWERING), D2P),
    ],
)
def test_flip_to_prefill(start: Pool, phases: tuple[Phase, ...], end: Pool) -> None:
    view = cluster(with_phases("a", start, *phases), instance("b", (request("x", "b", 9_000),), pool=start))
    assert try_move_decode_to_prefill(Pools.of(view)) == SetPool("a", end)


@pytest.mark.parametrize(
    ("start", "phases", "end"),
    [
        (P, (), D),
        (P, (Phase.PREFILL,), P2D),
        (D2P, (Phase.ANSWERING,), D),
        (D2P, (Phase.PREFILL, Phase.ANSWERING), P2D),
    ],
)
def test_flip_to_decode(start: Pool, phases: tuple[Phase, ...], end: Pool) -> None:
    queue = (request("x", "b", 9_000, phase=Phase.PREFILL), request("y", "b", phase=Phase.PREFILL))
    view = cluster(with_phases("a", start, *phases), instance("b", queue, pool=start))
    assert try_move_prefill_to_decode(Pools.of(view), ARROW.loads) == SetPool("a", end)


def test_an_instance_leaves_the_transitional_pool_when_its_old_work_is_done() -> None:
    view = cluster(
        with_phases("a", P2D, Phase.PREFILL),
        with_phases("b", P2D, Phase.ANSWERING),
        with_phases("c", D2P, Phase.ANSWERING),
        with_phases("d", D2P, Phase.PREFILL),
    )
    assert settle(Pools.of(view)) == [SetPool("b", D), SetPool("d", P)]


# ---- Alg. 1

LONG = Arrival("new", prompt_tokens=60_000, max_tokens=100, seq=0)
SHORT = Arrival("new", prompt_tokens=100, max_tokens=100, seq=0)


def queue(name: str, prompts: int, tokens: int = 30_000) -> tuple[RequestView, ...]:
    return tuple(request(f"{name}q{n}", name, tokens, phase=Phase.PREFILL) for n in range(prompts))


def test_a_prompt_goes_to_the_prefill_instance_with_the_least_delay() -> None:
    view = cluster(
        instance("a", queue("a", 2), pool=P), instance("b", queue("b", 1), pool=P), instance("c", pool=D)
    )
    assert ARROW.place(view, SHORT, 0.0) == Place("b")


def test_late_prompts_go_to_a_transitional_instance_or_flip_one() -> None:
    late, idle = queue("a", 9), request("x", "c", 5_000)
    view = cluster(
        instance("a", late, pool=P),
        instance("b", pool=D2P),
        instance("c", (idle,), pool=D),
        instance("d", pool=D),
    )
    assert ARROW.place(view, SHORT, 0.0) == Place("b")
    view = cluster(instance("a", late, pool=P), instance("c", (idle,), pool=D), instance("d", pool=D))
    # The flip is immediate: the request is placed there at once.
    assert ARROW.place(view, SHORT, 0.0) == Place("d", (SetPool("d", P),))


def test_busy_decode_instances_are_not_flipped_for_a_prompt() -> None:
    """The overload guard: the request waits at the prefill instance."""
    loaded = tuple(instance(name, (request(name, name, 300_000),), pool=D, capacity=400_000) for name in "cd")
    view = cluster(instance("a", queue("a", 9), pool=P), *loaded)
    assert ARROW.place(view, SHORT, 0.0) == Place("a")
    slow = tuple(instance(name, (request(name, name),), pool=D, token_interval_s=0.2) for name in "cd")
    assert ARROW.place(cluster(instance("a", queue("a", 9), pool=P), *slow), SHORT, 0.0) == Place("a")


def test_a_lost_prefill_pool_is_repaired_at_placement() -> None:
    view = cluster(instance("c", pool=D), instance("d", (request("x", "d"),), pool=D))
    assert ARROW.place(view, LONG, 0.0) == Place("c", (SetPool("c", P),))
    alone = cluster(instance("c", pool=D), instance("a", pool=P, state=InstanceState.SUSPECT))
    assert ARROW.place(alone, LONG, 0.0) == Place("c")


# ---- Alg. 2


def decode(*members: InstanceView) -> list[Action]:
    return [*ARROW.on_prefill_done(cluster(*members), request("r", "a"), 0.0)]


def test_a_request_stays_if_its_instance_now_decodes() -> None:
    for pool in (D, P2D, None):
        assert decode(instance("a", (request("r", "a"),), pool=pool), instance("b", pool=D)) == []


def test_a_handover_goes_to_the_decode_instance_with_the_fewest_tokens() -> None:
    source = instance("a", (request("r", "a"),), pool=P)
    light, heavy = (
        instance("c", (request("x", "c"),), pool=D),
        instance("b", (request("y", "b", 9_000),), pool=D),
    )
    assert decode(source, heavy, light) == [Migrate("r", "a", "c", "prefill done")]
    # Instead of an instance beyond its TPOT SLO, a transitional one is chosen; without one, another is
    # flipped.
    slow = replace(light, token_interval_s=0.2)
    transitional = instance("d", (request("z", "d", 90_000),), pool=P2D)
    assert decode(source, slow, transitional) == [Migrate("r", "a", "d", "prefill done")]
    spare = instance("e", pool=P)
    flip = SetPool("e", D)
    assert decode(source, slow, spare) == [flip, Migrate("r", "a", "e", "prefill done")]


def test_a_flip_of_the_source_keeps_the_request() -> None:
    source = instance("a", (request("r", "a"),), pool=P)
    slow = instance("c", (request("x", "c"),), pool=D, token_interval_s=0.2)
    assert decode(source, slow, instance("e", queue("e", 1), pool=P)) == [SetPool("a", D)]


def test_with_all_over_their_limits_the_least_loaded_is_chosen() -> None:
    source = instance("a", (request("r", "a"),), pool=P)
    slow = [
        instance("c", (request("x", "c", 9_000),), pool=D, token_interval_s=0.2),
        instance("d", (request("y", "d"),), pool=P2D, token_interval_s=0.2),
    ]
    assert decode(source, *slow) == [Migrate("r", "a", "d", "prefill done")]


def test_without_room_a_handover_queues_at_the_least_loaded() -> None:
    """Section 5.4; queued requests count as load of their target (section 5.3)."""
    source = instance("a", (request("r", "a"),), pool=P)
    full = [
        instance(name, (held := request(f"x{name}", name, 5_000),), pool=D, capacity=held.kv_tokens)
        for name in "cd"
    ]
    assert decode(source, *full) == [Migrate("r", "a", "c", "prefill done")]
    with_queue = replace(full[0], coming_tokens=100)
    assert decode(source, with_queue, full[1]) == [Migrate("r", "a", "d", "prefill done")]
    # An instance that could never hold the request.
    small = replace(full[0], kv_capacity_tokens=160)
    assert decode(source, small) == []


def test_with_the_filter_a_handover_without_room_is_retried_at_a_tick() -> None:
    arrow = Arrow(room=FILTER)
    held = request("x", "c", 5_000)
    source = instance("a", (request("r", "a"),), pool=P)
    full = instance("c", (held,), pool=D, capacity=held.kv_tokens)
    assert [*arrow.on_prefill_done(cluster(source, full), request("r", "a"), 0.0)] == []
    roomy = replace(full, kv_capacity_tokens=100_000)
    moves = arrow.on_tick(cluster(source, roomy), 0.0)
    assert list(moves) == [Migrate("r", "a", "c", "prefill done")]


# ---- section 5.5


def test_slow_tokens_flip_a_prefill_instance() -> None:
    slow = instance("c", (request("x", "c"),), pool=D, token_interval_s=0.2)
    view = cluster(instance("a", queue("a", 3), pool=P), instance("b", queue("b", 1), pool=P), slow)
    assert list(ARROW.on_tick(view, 0.0)) == [SetPool("b", P2D)]
    assert list(ARROW.on_tick(cluster(instance("b", pool=P), slow), 0.0)) == []


def test_slow_tokens_behind_remaining_prompts_cause_no_further_flip() -> None:
    flipped = instance("d", (request("y", "d"), *queue("d", 2)), pool=P2D, token_interval_s=0.4)
    prefill = (instance("a", queue("a", 3), pool=P), instance("b", queue("b", 1), pool=P))
    fast = instance("c", (request("x", "c"),), pool=D, token_interval_s=0.05)
    assert list(ARROW.on_tick(cluster(*prefill, fast, flipped), 0.0)) == []
    # If nothing else decodes, this is the only measured interval.
    idle = instance("c", pool=D)
    assert list(ARROW.on_tick(cluster(*prefill, idle, flipped), 0.0)) == [SetPool("b", P2D)]


def test_idle_prefill_instances_help_busy_decode_instances() -> None:
    loaded_decoder = instance("c", (request("x", "c", 300_000),), pool=D, capacity=400_000)
    view = cluster(instance("a", pool=P), instance("b", pool=P), loaded_decoder)
    assert list(ARROW.on_tick(view, 0.0)) == [SetPool("a", D)]
    lightly_loaded = replace(loaded_decoder, context_tokens=1_000)
    assert (
        list(ARROW.on_tick(cluster(instance("a", pool=P), instance("b", pool=P), lightly_loaded), 0.0)) == []
    )


@quick
@given(view=fleets(pools=ANY, all_active=True))
def test_literally_busy_decode_instances_get_every_idle_one(view: ClusterView) -> None:
    """`busy=decoding`: what moves is what the idle rule moves, as soon as anything decodes in its pools."""
    pools = Pools.of(view)
    decoders = pools.decode + pools.prefill_to_decode
    literal = Arrow(busy=DECODING)
    move = literal._monitored_flip(pools)
    # Of P->D instances only if no other one runs anything.
    interval_s = mean_token_interval_s(pools.decode) or mean_token_interval_s(pools.prefill_to_decode)
    if not decoders or interval_s > literal.tpot_slo_s:
        assert move == ARROW._monitored_flip(pools)
    elif not any(map(has_decodes_left, decoders)):
        assert move is None
    else:
        assert move == try_move_idle_to_decode(pools)


def test_the_idle_rule_moves_an_idle_instance_not_one_with_prompts() -> None:
    """Section 5.5, case 3: "idle prefill instances are added", though Alg. 4 prefers D->P instances."""
    loaded_decoder = instance("c", (request("x", "c", 300_000),), pool=D, capacity=400_000)
    to_prefill_instance = instance("b", (request("y", "b"), *queue("b", 2)), pool=D2P)
    view = cluster(instance("a", pool=P), to_prefill_instance, loaded_decoder)
    assert list(ARROW.on_tick(view, 0.0)) == [SetPool("a", D)]
    # Without an idle instance there is no move.
    prefilling = instance("a", queue("a", 1), pool=P)
    assert list(ARROW.on_tick(cluster(prefilling, to_prefill_instance, loaded_decoder), 0.0)) == []
    # A D->P instance whose prompts are done has no prefill work, and decodes already.
    done = instance("b", (request("y", "b"),), pool=D2P)
    assert list(ARROW.on_tick(cluster(instance("a", pool=P), done, loaded_decoder), 0.0)) == [SetPool("b", D)]


@quick
@given(fleets(pools=ANY))
def test_the_idle_rule_leaves_prompts_and_the_last_prefill_instance_alone(view: ClusterView) -> None:
    pools = Pools.of(view)
    move = try_move_idle_to_decode(pools)
    if move is not None:
        assert both_able(pools.after(move))
        assert not has_prefills_left(view.instances[move.instance_id])
        assert move.pool is D


@quick
@given(view=fleets(pools=tuple(Pool), all_active=True), arrival=arrivals)
def test_a_flip_is_not_reverted_on_the_same_loads(view: ClusterView, arrival: Arrival) -> None:
    """Alg. 1 does not take back an instance that the idle-prefill rule gave to decode."""
    moves = [a for a in ARROW.on_tick(view, 0.0) if isinstance(a, SetPool)]
    after = apply_moves(view, [*moves])
    given_to_decode = {m.instance_id for m in moves if view.instances[m.instance_id].pool in (P, D2P)}
    given_to_decode &= {m.instance_id for m in moves if m.pool in (D, P2D)}
    before = Pools.of(view)
    if not given_to_decode or not (before.prefill or before.decode_to_prefill):
        return
    interval_s = mean_token_interval_s(before.decode) or mean_token_interval_s(before.prefill_to_decode)
    if interval_s > ARROW.tpot_slo_s:
        # Flipped because tokens are late: with one more instance, the mean interval differs.
        return
    placement = ARROW.place(after, replace(arrival, excluded=frozenset()), 0.0)
    pools = Pools.of(after)
    if isinstance(placement, Place) and (pools.prefill or pools.decode_to_prefill):
        assert not {m.instance_id for m in placement.also if isinstance(m, SetPool)} & given_to_decode


@pytest.mark.parametrize("policy", [StaticPools(), StaticPools(dispatch=ROUND_ROBIN)])
@quick
@given(view=fleets(least=2, pools=(None,), all_active=True))
def test_static_pools_are_assigned_once(policy: StaticPools, view: ClusterView) -> None:
    """Half of the instances prefill, half decode, none is transitional, and nothing changes afterwards."""
    after = apply_moves(view, [*policy.on_tick(view, 0.0)])
    assert {i.pool for i in after.instances.values()} == {P, D}
    assert not any(isinstance(action, SetPool) for action in policy.on_tick(after, 0.5))
