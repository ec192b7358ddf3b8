"""Policies that know how much of a prompt each instance has cached."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.actions import Place
from tailrace.cluster import Arrival, CachedTokens, ClusterView
from tailrace.policy.ares.policy import Ares
from tailrace.policy.arrow.policy import Arrow
from tailrace.policy.base import Policy
from tailrace.policy.cascade.policy import Cascade
from tailrace.policy.pascal import Pascal
from tailrace.policy.prefix_affinity import PrefixAffinity
from tailrace.policy.session import Session
from tailrace.policy.tailrace.policy import Tailrace
from tests.policy.fleets import cluster, fleets, instance, quick

PAPERS: tuple[type[Policy], ...] = (Pascal, Ares, Arrow, Cascade)
NAMES = [f"w{n}" for n in range(8)]


def arrival(tokens: int = 4_000, **fields: object) -> Arrival:
    return replace(Arrival("r", tokens, 1_000, 0), **fields)  # type: ignore[arg-type]


def held(where: str, tokens: int) -> dict[str, CachedTokens]:
    return {where: CachedTokens(tokens, tokens)}


def idle(count: int) -> ClusterView:
    return cluster(*(instance(name) for name in NAMES[:count]))


@pytest.mark.parametrize("kind", PAPERS)
@given(view=fleets(), tokens=st.integers(1, 5_000), where=st.sampled_from(NAMES))
@quick
def test_published_policies_ignore_the_cache_by_default(
    kind: type[Policy], view: ClusterView, tokens: int, where: str
) -> None:
    plain, cache_aware = kind(), kind(cache_aware=True)
    with_cached = arrival(tokens, cached=held(where, tokens // 2))
    assert plain.place(view, with_cached, 1.0) == plain.place(view, arrival(tokens), 1.0)
    assert cache_aware.place(view, arrival(tokens), 1.0) == plain.place(view, arrival(tokens), 1.0)


CACHE_AWARE: tuple[Policy, ...] = (
    *(kind(cache_aware=True) for kind in PAPERS),
    PrefixAffinity(),
    Tailrace(),
)


@pytest.mark.parametrize("policy", CACHE_AWARE, ids=lambda policy: type(policy).__name__)
@pytest.mark.parametrize("count", [3, 8])
def test_a_tie_goes_to_the_instance_with_the_prefix(policy: Policy, count: int) -> None:
    for where in NAMES[:count]:
        placement = policy.place(idle(count), arrival(cached=held(where, 3_000)), 1.0)
        assert isinstance(placement, Place) and placement.instance_id == where


@pytest.mark.parametrize("policy", CACHE_AWARE, ids=lambda policy: type(policy).__name__)
def test_host_memory_counts_less_than_device_memory_and_more_than_none(policy: Policy) -> None:
    """KV in host memory has to be loaded: 3,000 tokens take as long as computing about 400."""

    def placed_on(**cached: CachedTokens) -> str:
        placement = policy.place(idle(3), arrival(cached=cached), 1.0)
        assert isinstance(placement, Place)
        return placement.instance_id

    in_host = CachedTokens(0, 3_000)
    assert placed_on(w1=in_host) == "w1"
    assert placed_on(w1=in_host, w2=CachedTokens(2_900, 2_900)) == "w2"
    assert placed_on(w1=in_host, w2=CachedTokens(2_000, 2_000)) == "w1"
    assert placed_on(w1=in_host, w2=CachedTokens(2_500, 3_000)) == "w2"
    # Loading this few tokens takes as long as computing them.
    assert placed_on(w1=CachedTokens(0, 40)) == placed_on()


@pytest.mark.parametrize("kind", [*PAPERS, PrefixAffinity])
def test_a_prefix_in_own_host_memory_is_not_pulled(kind: type[Policy]) -> None:
    busy = replace(instance("w1"), waiting=9, prefill_backlog_tokens=400_000, kv_used_tokens=400_000)
    view = cluster(instance("w0"), busy)
    there = CachedTokens(16_000, 16_000, 16_000)
    policy = kind(pulls=True)
    own = arrival(16_500, cached={"w0": CachedTokens(0, 16_000, 16_000), "w1": there})
    assert policy.place(view, own, 1.0) == Place("w0")
    part = arrival(16_500, cached={"w0": CachedTokens(0, 4_000, 4_000), "w1": there})
    assert policy.place(view, part, 1.0) == Place("w0", pull_from="w1")


@pytest.mark.parametrize("kind", [*PAPERS, PrefixAffinity])
@given(view=fleets(all_active=True, least=2), tokens=st.integers(1, 20_000), where=st.sampled_from(NAMES[:2]))
@quick
def test_pulls_do_not_affect_placement(
    kind: type[Policy], view: ClusterView, tokens: int, where: str
) -> None:
    with_cached = arrival(tokens, cached={where: CachedTokens(tokens // 2, tokens // 2, tokens // 2)})
    without = kind().place(view, with_cached, 1.0)
    pulling = kind(pulls=True).place(view, with_cached, 1.0)
    assert isinstance(without, Place) and isinstance(pulling, Place)
    assert without.pull_from == ""
    assert replace(pulling, pull_from="") == without
    assert pulling.pull_from in ("", where) and pulling.pull_from != pulling.instance_id


@pytest.mark.parametrize("kind", [*PAPERS, PrefixAffinity])
@pytest.mark.parametrize(("rate", "pull_from"), [(None, "w1"), (1e6, "w1"), (1e3, "")])
def test_a_prefix_is_pulled_if_that_is_faster(kind: type[Policy], rate: float | None, pull_from: str) -> None:
    """Computing 16,000 tokens takes half a second; the other instance has a queue of seconds."""
    busy = replace(instance("w1"), waiting=9, prefill_backlog_tokens=400_000, kv_used_tokens=400_000)
    view = cluster(replace(instance("w0"), migration_tokens_per_s=rate), busy)
    with_cached = arrival(16_500, cached={"w1": CachedTokens(16_000, 16_000, 16_000)})
    assert kind(pulls=True).place(view, with_cached, 1.0) == Place("w0", pull_from=pull_from)
    # A prefix that was placed there but not reported yet cannot be pulled.
    coming = arrival(16_500, cached=held("w1", 16_000))
    assert kind(pulls=True).place(view, coming, 1.0) == Place("w0")


@given(view=fleets(), session=st.text(min_size=1, max_size=8), names=st.lists(st.integers(0, 2**64 - 1)))
@quick
def test_a_session_stays_on_its_instance(view: ClusterView, session: str, names: list[int]) -> None:
    policy = Session()
    placed = policy.place(view, arrival(session_id=session), 0.0)
    again = policy.place(view, arrival(session_id=session, block_names=names), 5.0)
    assert placed == again
    if not isinstance(placed, Place):
        return
    others = [name for name in view.instances if name != placed.instance_id]
    for excluded in others:
        assert policy.place(view, arrival(session_id=session, excluded=frozenset({excluded})), 9.0) == placed


def test_sessions_are_identified_by_their_first_blocks_and_distributed_evenly() -> None:
    policy, view = Session(), idle(8)
    long = arrival(block_names=list(range(1_000, 1_020)))
    longer = arrival(block_names=[*range(1_000, 1_020), 5, 6])
    assert policy.place(view, long, 0.0) == policy.place(view, longer, 0.0)
    counts = Counter(policy.place(view, arrival(session_id=f"s{n}"), 0.0) for n in range(4_000))
    assert len(counts) == 8 and min(counts.values()) > 400
