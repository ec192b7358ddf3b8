"""Policies that are told what of an arrival each instance holds."""

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
def test_papers_follow_their_letter_unless_told(
    kind: type[Policy], view: ClusterView, tokens: int, where: str
) -> None:
    plain, knowing = kind(), kind(cache_aware=True)  # type: ignore[call-arg]
    told = arrival(tokens, cached=held(where, tokens // 2))
    assert plain.place(view, told, 1.0) == plain.place(view, arrival(tokens), 1.0)
    assert knowing.place(view, arrival(tokens), 1.0) == plain.place(view, arrival(tokens), 1.0)


KNOWING: tuple[Policy, ...] = (
    *(kind(cache_aware=True) for kind in PAPERS),  # type: ignore[call-arg]
    PrefixAffinity(),
    Tailrace(),
)


@pytest.mark.parametrize("policy", KNOWING, ids=lambda policy: type(policy).__name__)
@pytest.mark.parametrize("count", [3, 8])
def test_of_equals_the_one_with_the_prefix_gets_it(policy: Policy, count: int) -> None:
    for where in NAMES[:count]:
        placement = policy.place(idle(count), arrival(cached=held(where, 3_000)), 1.0)
        assert isinstance(placement, Place) and placement.instance_id == where


@pytest.mark.parametrize("policy", KNOWING, ids=lambda policy: type(policy).__name__)
def test_host_memory_counts_less_than_the_device_and_more_than_nothing(policy: Policy) -> None:
    """What is there has to be loaded first: of 3,000 tokens that takes what some 400 take to compute."""

    def goes_to(**cached: CachedTokens) -> str:
        placement = policy.place(idle(3), arrival(cached=cached), 1.0)
        assert isinstance(placement, Place)
        return placement.instance_id

    in_host = CachedTokens(0, 3_000)
    assert goes_to(w1=in_host) == "w1"
    assert goes_to(w1=in_host, w2=CachedTokens(2_900, 2_900)) == "w2"
    assert goes_to(w1=in_host, w2=CachedTokens(2_000, 2_000)) == "w1"
    assert goes_to(w1=in_host, w2=CachedTokens(2_500, 3_000)) == "w2"
    # Loading so few takes as long as computing them.
    assert goes_to(w1=CachedTokens(0, 40)) == goes_to()


@pytest.mark.parametrize("kind", [*PAPERS, PrefixAffinity])
def test_nothing_is_pulled_that_is_in_the_own_host_memory(kind: type[Policy]) -> None:
    busy = replace(instance("w1"), waiting=9, prefill_backlog_tokens=400_000, kv_used_tokens=400_000)
    view = cluster(instance("w0"), busy)
    there = CachedTokens(16_000, 16_000, 16_000)
    policy = kind(pulls=True)  # type: ignore[call-arg]
    own = arrival(16_500, cached={"w0": CachedTokens(0, 16_000, 16_000), "w1": there})
    assert policy.place(view, own, 1.0) == Place("w0")
    part = arrival(16_500, cached={"w0": CachedTokens(0, 4_000, 4_000), "w1": there})
    assert policy.place(view, part, 1.0) == Place("w0", pull_from="w1")


@pytest.mark.parametrize("kind", [*PAPERS, PrefixAffinity])
@given(view=fleets(all_active=True, least=2), tokens=st.integers(1, 20_000), where=st.sampled_from(NAMES[:2]))
@quick
def test_a_pull_changes_no_place_and_comes_from_whoever_has_more(
    kind: type[Policy], view: ClusterView, tokens: int, where: str
) -> None:
    told = arrival(tokens, cached={where: CachedTokens(tokens // 2, tokens // 2, tokens // 2)})
    without = kind().place(view, told, 1.0)
    pulling = kind(pulls=True).place(view, told, 1.0)  # type: ignore[call-arg]
    assert isinstance(without, Place) and isinstance(pulling, Place)
    assert without.pull_from == ""
    assert replace(pulling, pull_from="") == without
    assert pulling.pull_from in ("", where) and pulling.pull_from != pulling.instance_id


@pytest.mark.parametrize("kind", [*PAPERS, PrefixAffinity])
@pytest.mark.parametrize(("rate", "pull_from"), [(None, "w1"), (1e6, "w1"), (1e3, "")])
def test_a_pull_is_asked_for_where_it_is_quicker(
    kind: type[Policy], rate: float | None, pull_from: str
) -> None:
    """16,000 tokens take half a second to compute; the other one has a queue of seconds."""
    busy = replace(instance("w1"), waiting=9, prefill_backlog_tokens=400_000, kv_used_tokens=400_000)
    view = cluster(replace(instance("w0"), migration_tokens_per_s=rate), busy)
    told = arrival(16_500, cached={"w1": CachedTokens(16_000, 16_000, 16_000)})
    assert kind(pulls=True).place(view, told, 1.0) == Place("w0", pull_from=pull_from)  # type: ignore[call-arg]
    # What was placed there a moment ago is not there yet.
    coming = arrival(16_500, cached=held("w1", 16_000))
    assert kind(pulls=True).place(view, coming, 1.0) == Place("w0")  # type: ignore[call-arg]


@given(fleets(all_active=True, least=1), st.integers(1, 20_000), st.integers(0, 2**32))
@quick
def test_few_and_many_instances_are_told_alike(view: ClusterView, tokens: int, seed: int) -> None:
    """`tailrace` goes through a few one by one, and through many by columns."""
    cached = {
        name: CachedTokens(share * ((seed >> (n + 9)) % 3) // 2, share)
        for n, name in enumerate(view.instances)
        if (share := tokens * ((seed >> n) % 5) // 5)
    }
    told = arrival(tokens, cached=cached)
    by_one, by_columns = Tailrace(), Tailrace()
    by_columns.offers._few = 0
    assert by_one.place(view, told, 1.0) == by_columns.place(view, told, 1.0)


@given(view=fleets(), session=st.text(min_size=1, max_size=8), names=st.lists(st.integers(0, 2**64 - 1)))
@quick
def test_a_session_stays_until_its_instance_goes(view: ClusterView, session: str, names: list[int]) -> None:
    policy = Session()
    placed = policy.place(view, arrival(session_id=session), 0.0)
    again = policy.place(view, arrival(session_id=session, block_names=names), 5.0)
    assert placed == again
    if not isinstance(placed, Place):
        return
    others = [name for name in view.instances if name != placed.instance_id]
    for gone in others:
        assert policy.place(view, arrival(session_id=session, excluded=frozenset({gone})), 9.0) == placed


def test_sessions_are_told_by_their_first_blocks_and_spread_evenly() -> None:
    policy, view = Session(), idle(8)
    long = arrival(block_names=list(range(1_000, 1_020)))
    longer = arrival(block_names=[*range(1_000, 1_020), 5, 6])
    assert policy.place(view, long, 0.0) == policy.place(view, longer, 0.0)
    counts = Counter(policy.place(view, arrival(session_id=f"s{n}"), 0.0) for n in range(4_000))
    assert len(counts) == 8 and min(counts.values()) > 400
