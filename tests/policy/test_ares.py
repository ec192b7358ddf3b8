"""ARES's loads, variance and Algorithm 1, compared with direct implementations of the paper."""

from __future__ import annotations

import dataclasses
import math
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.actions import Migrate, Place
from tailrace.cluster import (
    Arrival,
    CachedTokens,
    ClusterView,
    InstanceState,
    InstanceView,
    Phase,
    Pool,
    RequestState,
    RequestView,
)
from tailrace.perf.horizon import HORIZON, NOW, Floats, FutureLoad, Horizon
from tailrace.perf.remaining import expected_remaining
from tailrace.policy.ares import rescheduling
from tailrace.policy.ares.policy import CURRENT_LOAD, OFF, VARIANCE, Ares
from tailrace.policy.ares.rescheduling import (
    Loads,
    Move,
    Rescheduling,
    change,
    collect,
    time_weighted_variance,
)
from tailrace.policy.candidates import kv_needed_tokens
from tests.policy.clusters import clusters

HORIZONS = [HORIZON, NOW, Horizon(length=40, points=40)]
EAGER = Rescheduling(theta=0.0, theta_under=1.0)


def load_at(requests: list[tuple[int, float]], step: int) -> int:
    """Return the token load after `step` steps, computed step by step."""
    total = 0
    for tokens, left in requests:
        for _ in range(step):
            if left <= 0:
                break
            tokens += 1
            left -= 1
        total += tokens if left > 0 or step == 0 else 0
    return total


@given(st.lists(st.tuples(st.integers(1, 300), st.just(math.inf) | st.integers(0, 60)), max_size=8))
def test_future_load_equals_simulation_step_by_step(requests: list[tuple[int, float]]) -> None:
    horizon = Horizon(length=50, points=10)
    assert FutureLoad(horizon)(requests) == tuple(load_at(requests, int(t)) for t in horizon.steps)


@pytest.mark.parametrize("horizon", HORIZONS)
def test_weights_of_the_future_sum_to_one(horizon: Horizon) -> None:
    assert horizon.weights[0] == 1.0
    assert horizon.steps[0] == 0.0
    if horizon.points:
        assert horizon.betas.sum() == pytest.approx(1.0)
        assert horizon.steps[-1] == horizon.length
        assert horizon.betas[-1] / horizon.betas[0] == pytest.approx(0.1, rel=0.4)


@pytest.mark.parametrize(
    ("length", "points", "end"), [(10, 11, 0.1), (0, 0, 0.1), (10, 5, 0.0), (10, -1, 0.5)]
)
def test_an_invalid_horizon_is_rejected(length: int, points: int, end: float) -> None:
    with pytest.raises(ValueError, match="horizon"):
        Horizon(length=length, points=points, end_weight=end)


@given(
    st.integers(2, 6).flatmap(
        lambda n: st.tuples(
            st.lists(st.lists(st.floats(0, 1e5), min_size=4, max_size=4), min_size=n, max_size=n),
            st.permutations(range(n)),
        )
    ),
    st.lists(st.floats(0, 1e4), min_size=4, max_size=4),
)
def test_fast_variance_change_equals_the_naive_formula(
    loads_and_order: tuple[list[list[float]], list[int]], load: list[float]
) -> None:
    rows, order = loads_and_order
    tokens, moved = np.array(rows), np.array(load)
    source, target = order[:2]
    weights = np.array([1.0, 0.5, 0.3, 0.2])
    after = tokens.copy()
    after[source] -= moved
    after[target] += moved
    naive = time_weighted_variance(after, weights) - time_weighted_variance(tokens, weights)
    fast = change(moved, tokens[source], tokens[target], weights, len(tokens))
    assert fast == pytest.approx(naive, rel=1e-6, abs=1e-2)


def brute_candidates(loads: Loads, over: set[int], under: set[int]) -> set[tuple[str, int, int]]:
    """Return the candidates by lines 18-23 as published."""
    found = set()
    predicts = loads.horizon.points > 0
    for s in over:
        for t in under - {s}:
            source, target = loads.instances[s], loads.instances[t]
            for r in source.requests:
                on_host = r.state is RequestState.PREEMPTED and r.host_kv_tokens > 0
                if not on_host and r.state is not RequestState.RUNNING:
                    continue
                if r.phase is Phase.PREFILL or r.migrating:
                    continue
                remaining = r.predicted_remaining_tokens if predicts else None
                interval_s = source.token_interval_s or 0.01823
                migration_s = 0.01 + r.context_tokens / (target.migration_tokens_per_s or 50_000)
                expected = expected_remaining(r) if predicts else math.inf
                if not expected > migration_s / interval_s:
                    continue
                limit = 0.9 * target.kv_capacity_tokens
                if loads.tokens[t, 0] + r.context_tokens + (remaining or 0.0) > limit:
                    continue
                needed = kv_needed_tokens(r.context_tokens, target.block_tokens)
                longest = target.max_model_len or math.inf
                if source.migrations_out or needed > min(target.kv_free_tokens, longest):
                    continue
                found.add((r.request_id, s, t))
    return found


def loads_after(loads: Loads, request: RequestView, source: int, target: int) -> Floats:
    """Return all loads after moving the request, computed step by step."""
    tokens = loads.tokens.copy()
    predicts = loads.horizon.points > 0
    remaining = expected_remaining(request) if predicts else math.inf
    for k, step in enumerate(loads.horizon.steps):
        if k == 0 or step < remaining:
            tokens[source, k] -= request.context_tokens + step
            tokens[target, k] += request.context_tokens + step
    return tokens


@pytest.mark.parametrize("horizon", HORIZONS)
@pytest.mark.parametrize("rescheduling", [Rescheduling(), EAGER])
@given(view=clusters(active=True, least=2))
def test_algorithm_1_equals_brute_force(
    horizon: Horizon, rescheduling: Rescheduling, view: ClusterView
) -> None:
    loads = collect(list(view.instances.values()), horizon)
    over, under = rescheduling.classify(loads)

    weighted = [float(row[1:] @ horizon.betas) if horizon.points else float(row[0]) for row in loads.tokens]
    mean = sum(weighted) / len(weighted)
    near = 1e-9 * (1.0 + mean)
    for i, w in enumerate(weighted):
        if abs(w - (1 + rescheduling.theta) * mean) > near:
            assert (i in over) == (w > (1 + rescheduling.theta) * mean)
        if abs(loads.tokens[i, 0] - (1 + rescheduling.theta_under) * mean) > near:
            assert (i in under) == (loads.tokens[i, 0] < (1 + rescheduling.theta_under) * mean)

    expected = brute_candidates(loads, set(over.tolist()), set(under.tolist()))
    if len(over) and len(under):
        found = rescheduling.enumerate(loads, over, rescheduling.targets(loads, under))
        assert {
            (found.requests[row].request_id, found.sources[row], found.targets.positions[column])
            for row, column in np.argwhere(found.allowed())
        } == expected

    before = time_weighted_variance(loads.tokens, horizon.weights)
    gains = {}
    for name, s, t in expected:
        request = next(r for r in loads.instances[s].requests if r.request_id == name)
        after = time_weighted_variance(loads_after(loads, request, s, t), horizon.weights)
        gains[name, s, t] = before - after
    best = max(gains.values(), default=0.0)
    move = rescheduling.plan(loads)
    tolerance = 1e-9 * before + 1e-6
    if move is None:
        assert best <= tolerance
    else:
        chosen = gains[move.request.request_id, move.source, move.target]
        assert chosen == pytest.approx(best, abs=tolerance)
        assert move.gain == pytest.approx(chosen, abs=tolerance)


@given(view=clusters(active=True, least=1))
def test_loads_that_workers_do_not_report_are_those_that_they_would_report(view: ClusterView) -> None:
    silent = [dataclasses.replace(i, future_load=()) for i in view.instances.values()]
    reporting = [
        dataclasses.replace(
            i, future_load=FutureLoad()([(r.context_tokens, expected_remaining(r)) for r in i.requests])
        )
        for i in silent
    ]
    expected = collect(reporting, HORIZON).tokens
    for instances in (silent, [*silent[:1], *reporting[1:]]):
        np.testing.assert_array_equal(collect(instances, HORIZON).tokens, expected)


@pytest.mark.parametrize("horizon", HORIZONS)
@given(view=clusters(active=True, least=2))
def test_loads_after_a_move_match_the_variance(horizon: Horizon, view: ClusterView) -> None:
    loads = collect(list(view.instances.values()), horizon)
    move = EAGER.plan(loads)
    if move is None:
        return
    after = EAGER.after(loads, move)
    expected = loads_after(loads, move.request, move.source, move.target).clip(min=0.0)
    np.testing.assert_allclose(after.tokens, expected, atol=1e-6)
    source = after.instances[move.source]
    again = EAGER.plan(after)
    assert source.migrations_out == loads.instances[move.source].migrations_out + 1
    assert again is None or again.request.request_id != move.request.request_id


@given(
    view=clusters(active=True, least=1),
    tokens=st.integers(1, 5_000),
    remaining=st.just(math.inf) | st.floats(0, 5e3),
)
def test_dispatch_leaves_the_least_variance(view: ClusterView, tokens: int, remaining: float) -> None:
    instances = list(view.instances.values())
    loads = collect(instances, HORIZON)
    added = HORIZON.contributions(np.array([float(tokens)]), np.array([remaining]))[0]
    variances = []
    for i in range(len(instances)):
        after = loads.tokens.copy()
        after[i] += added
        variances.append(time_weighted_variance(after, HORIZON.weights))
    chosen = instances.index(Ares(dispatch=VARIANCE).choose(instances, tokens, remaining))
    assert variances[chosen] == pytest.approx(min(variances), rel=1e-9, abs=1e-3)


@given(view=clusters())
def test_current_load_rescheduling_ignores_predictions(view: ClusterView) -> None:
    def without_predictions(instance: InstanceView) -> InstanceView:
        requests = tuple(dataclasses.replace(r, predicted_remaining_tokens=None) for r in instance.requests)
        return dataclasses.replace(instance, requests=requests, future_load=())

    other = ClusterView(
        MappingProxyType({name: without_predictions(i) for name, i in view.instances.items()})
    )
    policy = Ares(rescheduling=CURRENT_LOAD)
    assert policy.on_tick(view, 0.0) == policy.on_tick(other, 0.0)


def request(name: str, where: str, tokens: int, remaining: float | None) -> RequestView:
    return RequestView(
        request_id=name,
        instance_id=where,
        phase=Phase.ANSWERING,
        state=RequestState.RUNNING,
        prompt_tokens=tokens,
        output_tokens=0,
        max_tokens=32_768,
        kv_tokens=tokens,
        predicted_remaining_tokens=remaining,
    )


def instance(name: str, held: list[RequestView], pool: Pool | None = Pool.DECODE) -> InstanceView:
    tokens = sum(r.context_tokens for r in held)
    return InstanceView(
        name,
        pool=pool,
        kv_capacity_tokens=200_000,
        kv_used_tokens=tokens,
        context_tokens=tokens,
        token_interval_s=0.02,
        future_load=FutureLoad()([(r.context_tokens, expected_remaining(r)) for r in held]),
        requests=tuple(held),
    )


def cluster(*instances: InstanceView) -> ClusterView:
    return ClusterView(MappingProxyType({i.instance_id: i for i in instances}))


def test_requests_about_to_finish_are_not_migrated() -> None:
    """Section 5.1: the load of w0 is about to drop, which only predictions show."""
    ending = [request(f"a{n}", "w0", 5_000, 5.0) for n in range(4)]
    staying = [request(f"b{n}", "w1", 2_500, 9_000.0) for n in range(4)]
    view = cluster(instance("w0", ending), instance("w1", staying))
    assert Ares(rescheduling=CURRENT_LOAD).on_tick(view, 0.0)
    assert not Ares().on_tick(view, 0.0)


def test_a_long_request_is_migrated_before_the_imbalance_occurs() -> None:
    """Equal loads now, but one instance will be empty soon."""
    growing = [request(f"a{n}", "w0", 1_000, 20_000.0) for n in range(8)]
    ending = [request(f"b{n}", "w1", 2_000, 300.0) for n in range(4)]
    view = cluster(instance("w0", growing), instance("w1", ending))
    assert not Ares(rescheduling=CURRENT_LOAD).on_tick(view, 0.0)
    (action,) = Ares().on_tick(view, 0.0)
    assert isinstance(action, Migrate)
    assert (action.source_id, action.target_id) == ("w0", "w1")


def test_variance_dispatch_chooses_the_least_future_load() -> None:
    ready = request("r", "p0", 500, 4_000.0)
    growing = [request(f"a{n}", "d0", 1_000, 20_000.0) for n in range(8)]
    ending = [request(f"b{n}", "d1", 1_050, 200.0) for n in range(8)]
    view = cluster(instance("d0", growing), instance("d1", ending), instance("p0", [ready], Pool.PREFILL))
    by_variance = Ares(dispatch=VARIANCE)
    assert by_variance.on_prefill_done(view, ready, 0.0) == (Migrate("r", "p0", "d1", "prefill done"),)
    # Every variant that the paper compares dispatches by KV load (section 6.1).
    for policy in (Ares(rescheduling=OFF), Ares(rescheduling=CURRENT_LOAD), Ares()):
        assert policy.on_prefill_done(view, ready, 0.0) == (Migrate("r", "p0", "d0", "prefill done"),)


def test_migration_time_is_estimated_from_the_measured_rate() -> None:
    """Line 20: 300 remaining tokens take 6 s; 20,000 tokens are copied in 0.4 s, in 5 s or in 20 s."""
    moving = [request("r", "w0", 20_000, 300.0), request("s", "w0", 20_000, 5.0)]
    idle = instance("w1", [])
    for measured, worth_it in ((None, True), (4_000.0, True), (1_000.0, False)):
        target = dataclasses.replace(idle, migration_tokens_per_s=measured)
        actions = Ares().on_tick(cluster(instance("w0", moving), target), 0.0)
        assert [a.request_id for a in actions if isinstance(a, Migrate)] == (["r"] if worth_it else [])


def test_a_slow_target_does_not_hide_an_equally_loaded_fast_one() -> None:
    moving = [request("r", "w0", 20_000, 300.0), request("s", "w0", 20_000, 5.0)]
    slow = dataclasses.replace(instance("w1", []), migration_tokens_per_s=10.0)
    quick = dataclasses.replace(instance("w2", []), migration_tokens_per_s=50_000.0)
    (action,) = Ares().on_tick(cluster(instance("w0", moving), slow, quick), 0.0)
    assert isinstance(action, Migrate) and action.target_id == "w2"


def test_a_preempted_request_can_be_migrated_while_its_kv_is_in_host_memory() -> None:
    out = dataclasses.replace(request("r", "w0", 20_000, 9_000.0), state=RequestState.PREEMPTED, kv_tokens=0)
    for host_kv_tokens, moved in ((20_000, ["r"]), (0, [])):
        held = dataclasses.replace(out, host_kv_tokens=host_kv_tokens)
        staying = dataclasses.replace(request("s", "w0", 40_000, 9_000.0), migrating=True)
        view = cluster(instance("w0", [held, staying]), instance("w1", []))
        for policy in (Ares(), Ares(rescheduling=CURRENT_LOAD)):
            actions = policy.on_tick(view, 0.0)
            assert [a.request_id for a in actions if isinstance(a, Migrate)] == moved


def test_a_handover_without_room_is_retried_at_a_tick() -> None:
    ready = request("r", "p0", 500, 4_000.0)
    full = dataclasses.replace(instance("d0", []), kv_used_tokens=200_000)
    prefill = instance("p0", [ready], Pool.PREFILL)
    for policy in (Ares(rescheduling=OFF), Ares()):
        assert not policy.on_prefill_done(cluster(full, prefill), ready, 0.0)
        assert not policy.on_tick(cluster(full, prefill), 0.0)
        later = cluster(dataclasses.replace(full, kv_used_tokens=0), prefill)
        assert policy.on_tick(later, 0.0) == [Migrate("r", "p0", "d0", "prefill done")]


def test_retried_handovers_share_the_free_kv() -> None:
    ready = [request(f"r{n}", "p0", 500, None) for n in range(5)]
    tight = dataclasses.replace(instance("d0", []), kv_used_tokens=200_000 - 1_100)
    view = cluster(tight, instance("p0", ready, Pool.PREFILL))
    assert len(Ares(rescheduling=OFF).on_tick(view, 0.0)) == 2


def test_targets_as_loaded_as_the_source_do_not_hide_better_ones() -> None:
    """With many instances, pruning keeps the target with the largest gain."""
    rng = np.random.default_rng(7)
    held = [
        [
            request(f"{n}-{m}", f"w{n:02d}", int(t), float(r))
            for m, (t, r) in enumerate(zip(ts, rs, strict=True))
        ]
        for n, (ts, rs) in enumerate(
            zip(rng.integers(100, 9_000, (24, 12)), rng.integers(0, 9_000, (24, 12)), strict=True)
        )
    ]
    loads = collect([instance(f"w{n:02d}", rows) for n, rows in enumerate(held)], HORIZON)
    rescheduling = Rescheduling()
    over, under = rescheduling.classify(loads)
    before = time_weighted_variance(loads.tokens, HORIZON.weights)
    gains = []
    for name, s, t in brute_candidates(loads, set(over.tolist()), set(under.tolist())):
        moved = next(r for r in loads.instances[s].requests if r.request_id == name)
        gains.append(before - time_weighted_variance(loads_after(loads, moved, s, t), HORIZON.weights))
    move = rescheduling.plan(loads)
    assert isinstance(move, Move)
    assert move.gain == pytest.approx(max(gains), rel=1e-9)


def test_without_two_active_instances_nothing_is_migrated() -> None:
    assert not Ares().on_tick(cluster(), 0.0)
    assert not Ares().on_tick(cluster(instance("w0", [])), 0.0)
    suspect = dataclasses.replace(instance("w0", []), state=InstanceState.SUSPECT)
    assert not Ares().on_tick(cluster(suspect), 0.0)


@pytest.mark.parametrize("horizon", HORIZONS)
@given(view=clusters(active=True, least=3))
def test_the_batch_size_of_sources_does_not_affect_the_gain(horizon: Horizon, view: ClusterView) -> None:
    loads = collect(list(view.instances.values()), horizon)
    at_once = EAGER.plan(loads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rescheduling, "_SOURCES", 1)
        one_by_one = EAGER.plan(loads)
    assert (at_once is None) == (one_by_one is None)
    if at_once is not None and one_by_one is not None:
        assert one_by_one.gain == pytest.approx(at_once.gain)


def test_of_many_overloaded_instances_each_has_its_turn() -> None:
    """No request of the others may move, so a plan that examines only the largest bounds finds nothing."""
    stuck = [request("s", "w0", 9_000, 30_000.0)]
    many = [
        dataclasses.replace(instance(f"w{n:02d}", stuck), migrations_out=1)
        for n in range(rescheduling.SOURCES_MAX + 4)
    ]
    movable = instance("w90", [request(name, "w90", 4_000, 30_000.0) for name in "ab"])
    loads = collect([*many, movable, *(instance(f"w{n}", []) for n in range(91, 99))], HORIZON)
    over, _ = EAGER.classify(loads)
    assert len(over) > rescheduling.SOURCES_MAX
    moves = [EAGER.plan(loads, turn) for turn in range(4)]
    assert {loads.instances[move.source].instance_id for move in moves if move is not None} == {"w90"}
    # The turns repeat.
    assert [EAGER.plan(loads, turn) is None for turn in range(4, 8)] == [move is None for move in moves]


def test_a_move_with_exactly_the_least_gain_is_made() -> None:
    """Two requests of 4,096 tokens on one of two instances: moving one of them removes all variance."""
    held = [request(name, "w0", 4_096, None) for name in "ab"]
    loads = collect([instance("w0", held), instance("w1", [])], NOW)
    assert Rescheduling(least_gain=1.0).plan(loads) is not None
    assert Rescheduling(least_gain=1.0 + 2**-52).plan(loads) is None


def test_a_target_is_filled_up_to_its_memory_share() -> None:
    """Line 21 at its limit."""
    held = [request(name, "w0", 4_096, None) for name in "ab"]
    target = dataclasses.replace(instance("w1", []), kv_capacity_tokens=8_192)
    loads = collect([instance("w0", held), target], NOW)
    assert Rescheduling(memory_share=0.5).plan(loads) is not None
    assert Rescheduling(memory_share=0.5 - 2**-20).plan(loads) is None


def test_cached_tokens_reduce_the_load_if_cache_aware() -> None:
    held = [request("a", "w0", 4_000, None)], [request("b", "w1", 4_100, None)]
    view = cluster(instance("w0", held[0]), instance("w1", held[1]))
    arrival = Arrival("new", 1_000, 100, 0, cached={"w1": CachedTokens(500, 500)})
    # Without prefill instances, arrivals go to the instance with the least KV.
    merged = cluster(*(dataclasses.replace(i, pool=None) for i in view.instances.values()))
    assert Ares(rescheduling=OFF, cache_aware=True).place(merged, arrival, 0.0) == Place("w1")
    assert Ares(rescheduling=OFF).place(merged, arrival, 0.0) == Place("w0")


def test_the_prefill_backlog_counts_as_kv() -> None:
    with_backlog = dataclasses.replace(
        instance("w0", [], None), kv_used_tokens=1_000, prefill_backlog_tokens=500
    )
    without_backlog = dataclasses.replace(instance("w1", [], None), kv_used_tokens=1_200)
    arrival = Arrival("new", 1_000, 100, 0)
    assert Ares(rescheduling=OFF).place(cluster(with_backlog, without_backlog), arrival, 0.0) == Place("w1")


def test_without_a_prediction_only_current_tokens_count_toward_the_share() -> None:
    target = dataclasses.replace(instance("d0", []), kv_capacity_tokens=1_000, context_tokens=400)
    policy = Ares(dispatch=VARIANCE, memory_share=0.5)
    assert policy.is_memory_safe(target, request("r", "p0", 100, None))
    assert policy.is_memory_safe(target, request("r", "p0", 99, 1.0))
    assert not policy.is_memory_safe(target, request("r", "p0", 100, 1.0))


def test_a_retried_handover_without_room_does_not_block_others() -> None:
    ready = [request("long", "p0", 5_000, None), request("short", "p0", 500, None)]
    tight = dataclasses.replace(instance("d0", []), kv_used_tokens=200_000 - 1_100)
    actions = Ares(rescheduling=OFF).on_tick(cluster(tight, instance("p0", ready, Pool.PREFILL)), 0.0)
    assert [a.request_id for a in actions if isinstance(a, Migrate)] == ["short"]
