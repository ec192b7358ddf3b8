"""The tailrace policy on fleets of several kinds of instances, and of one."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.actions import Place
from tailrace.cluster import Arrival, CachedTokens, ClusterView, InstanceState, InstanceView, Phase
from tailrace.perf.measured import Measured
from tailrace.perf.steps import StepModel
from tailrace.policy.requests import table_of
from tailrace.policy.tailrace.costs import Costs, Offers
from tailrace.policy.tailrace.policy import Tailrace
from tailrace.profiles import load_profile
from tests.policy.clusters import clusters, random_cluster
from tests.policy.fleets import cluster, fleets, instance, quick, request

FAST = Measured.of_profile(load_profile("llama-3.1-8b-h100"), 2048)
SLOW = Measured.of_profile(load_profile("llama-3.1-8b-l40s"), 2048)
# Idle steps of 6.4 and 22.2 ms.
FAST_S, SLOW_S = FAST.steps.decode_base_s, SLOW.steps.decode_base_s
views = fleets(least=1) | clusters(least=1)


def of_kinds(view: ClusterView, kind: Callable[[int], Measured | None]) -> ClusterView:
    """Return the view with the n-th instance measured as `kind(n)` says."""
    members = enumerate(view.instances.values())
    return cluster(*(dataclasses.replace(each, measured=kind(n)) for n, each in members))


def offers_of(view: ClusterView, tpot_slo_s: float) -> Offers:
    offers = Offers(Costs(StepModel.of_profile(None), tpot_slo_s))
    offers.update(view, 0.0)
    return offers


def answering(name: str, count: int, measured: Measured, phase: Phase = Phase.ANSWERING) -> InstanceView:
    """Return an instance that decodes `count` requests."""
    held = tuple(request(f"{name}-{n}", name, phase=phase) for n in range(count))
    return dataclasses.replace(instance(name, held), measured=measured)


def arrivals_s(*instances: InstanceView, tpot_slo_s: float) -> Mapping[str, float]:
    """Return what a short prompt costs on each instance."""
    offers = offers_of(cluster(*instances), tpot_slo_s)
    costs_s = offers.arrival_s(Arrival("new", 200, 100, 0), 0.0, 0.0)
    return dict(zip(offers.at, costs_s.tolist(), strict=True))


# ---- fleets of one kind


@quick
@given(view=views, slo_s=st.sampled_from((0.01, 0.05, 0.15)), measured=st.sampled_from((FAST, SLOW, None)))
def test_nothing_is_spared_on_a_fleet_of_one_kind(
    view: ClusterView, slo_s: float, measured: Measured | None
) -> None:
    """To the bit: any difference could decide between two placements that cost the same."""
    offers = offers_of(of_kinds(view, lambda _: measured), slo_s)
    assert not offers.offer.spared_s.any()
    for here, answering in zip(offers.instances, offers.offer.answering.tolist(), strict=True):
        step_s = offers.costs.steps_of(here).decode_s(here.running, here.kv_used_tokens)
        share = min(1.0, step_s / slo_s)
        held = table_of(here.requests)
        prompts = len(held.prompts()) if here.prefill_backlog_tokens else 0
        decoding = max(1, here.running + here.waiting - prompts)
        reasons = min(1.0, held.reasoning().requests / decoding)
        assert answering == (1.0 - reasons) * share * share


# Of the decisions below: what concerns several kinds must not change them.
GOLDEN = {
    "fast": "c1c7eaf388b5e64bdf3b8f89adfba341e225a58093fd8c30a69c6e13b51b7577",
    "slow": "17cf596c1f3e2e8a7c9cdcd13d0da195db7fc7849321910e4da67010f56558c7",
}


@pytest.mark.parametrize("kind", GOLDEN)
def test_decisions_on_a_fleet_of_one_kind_have_not_changed(kind: str) -> None:
    measured = {"fast": FAST, "slow": SLOW}[kind]
    random, digest, moves = Random(7), hashlib.sha256(), 0
    policies = [Tailrace(tpot_slo_s=slo_s, tpot_limit=0.0) for slo_s in (0.02, 0.05, 0.15)]
    for seed in range(200):
        counts = [random.choice((0, 1, 3, 8, 20)) for _ in range(6)]
        view = of_kinds(
            random_cluster(counts, seed, [*[InstanceState.ACTIVE] * 5, *InstanceState]), lambda _: measured
        )
        held = {
            name: CachedTokens(n, n) for name in view.instances if (n := random.choice((0, 0, 256, 2_048)))
        }
        cached = random.choice(({}, held))
        arrival = Arrival("new", random.choice((20, 300, 3_000, 30_000)), 100, seed, cached=cached)
        for policy in policies:
            actions = policy.on_tick(view, 10.0)
            moves += len(actions)
            digest.update(repr((policy.place(view, arrival, 10.0), list(actions))).encode())
    assert moves > 100
    assert digest.hexdigest() == GOLDEN[kind]


# ---- fleets of several kinds


def test_a_slow_kind_within_the_slo_costs_an_answer_as_much_as_a_fast_one() -> None:
    """The answer is in time on either, so only waits and load are left to choose by."""
    idle = arrivals_s(answering("fast", 0, FAST), answering("slow", 0, SLOW), tpot_slo_s=0.05)
    # 256 steps that are 15.8 ms longer would be 4 s, or 0.8 s by the square of their share of the SLO.
    assert 0.0 < idle["slow"] - idle["fast"] < 0.2
    # So it gets requests before the fast one has a queue.
    view = cluster(answering("fast", 60, FAST), answering("slow", 0, SLOW))
    assert Tailrace(tpot_slo_s=0.05).place(view, Arrival("new", 200, 100, 0), 0.0) == Place("slow")


def test_load_counts_on_a_slow_kind() -> None:
    loads = arrivals_s(
        answering("fast", 0, FAST), *(answering(f"slow{n}", n, SLOW) for n in (0, 20, 80)), tpot_slo_s=0.05
    )
    assert loads["slow0"] < loads["slow20"] < loads["slow80"]


def test_a_kind_that_misses_the_slo_when_idle_costs_in_full() -> None:
    missed = arrivals_s(answering("fast", 60, FAST), answering("slow", 0, SLOW), tpot_slo_s=0.02)
    assert missed["slow"] > 256 * SLOW_S
    view = cluster(answering("fast", 60, FAST), answering("slow", 0, SLOW))
    assert Tailrace(tpot_slo_s=0.02).place(view, Arrival("new", 200, 100, 0), 0.0) == Place("fast")


def test_a_reasoning_request_is_spared_nothing() -> None:
    """Its user waits for the first answering token, so that a slow step delays it."""
    fast, slow = (answering(*kind, Phase.REASONING) for kind in (("fast", 4, FAST), ("slow", 4, SLOW)))
    mixed = offers_of(cluster(fast, slow), 0.05).offer
    assert mixed.reasoning.tolist() == [1.0, 1.0]
    assert not mixed.spared_s.any()


@quick
@given(view=views, seed=st.integers(0, 99), slo_s=st.sampled_from((0.01, 0.05, 0.15)))
def test_at_most_the_kind_s_own_share_of_a_step_is_spared(view: ClusterView, seed: int, slo_s: float) -> None:
    random = Random(seed)
    offers = offers_of(of_kinds(view, lambda _: random.choice((FAST, SLOW))), slo_s)
    steps = [offers.costs.steps_of(each) for each in offers.instances]
    shortest_s = min(each.decode_base_s for each in steps)
    for each, spared in zip(steps, offers.offer.spared_s.tolist(), strict=True):
        assert -1e-12 <= spared <= each.decode_base_s - shortest_s + 1e-12
        assert each.decode_base_s < slo_s or spared == 0.0


def test_a_new_kind_in_the_fleet_counts_for_all() -> None:
    """Offers kept from before would compare with a step that is no longer the shortest."""
    slow = [answering(f"slow{n}", 3 * n, SLOW) for n in range(3)]
    offers = Offers(Costs(StepModel.of_profile(None), 0.05))
    offers.update(cluster(*slow, answering("z", 2, SLOW)), 0.0)
    alone = offers.offer.answering.tolist()
    view = cluster(*slow, answering("z", 2, FAST))
    offers.update(view, 0.0)
    assert offers.offer.answering.tolist() == offers_of(view, 0.05).offer.answering.tolist() != alone
