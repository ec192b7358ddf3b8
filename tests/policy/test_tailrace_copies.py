"""The tailrace policy: when a hot prefix is copied in advance."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.actions import CopyPrefix, Migrate
from tailrace.cluster import (
    CachedTokens,
    ClusterView,
    HotPrefix,
    HotPrefixes,
    InstanceState,
    InstanceView,
)
from tailrace.perf.steps import StepModel
from tailrace.policy.tailrace.copies import COPIES_MAX, Copies
from tailrace.policy.tailrace.costs import Costs
from tailrace.policy.tailrace.policy import Tailrace
from tailrace.profiles import load_profile
from tests.policy.fleets import cluster, fleets, instance, quick

PROFILE = load_profile("llama-3.1-8b-h100")
TOKENS = 12_000


def there(tokens: int = TOKENS) -> CachedTokens:
    """Return tokens that the instance has reported."""
    return CachedTokens(tokens, tokens, tokens)


def busy(name: str, **changes: object) -> InstanceView:
    """Return an instance with a queue of seconds."""
    changed: dict[str, object] = {"waiting": 4, "prefill_backlog_tokens": 60_000, **changes}
    return replace(instance(name), **changed)  # type: ignore[arg-type]


def hot(hits: int = 8, instances: str = "abc", **cached: CachedTokens) -> HotPrefix:
    """Return a hot prefix; every holder has a request that begins with it."""
    requests = {name: f"r-{name}" for name in cached}
    return HotPrefix(TOKENS, hits, cached, requests, frozenset(instances))


def copies(
    view: ClusterView, *prefixes: HotPrefix, copying: str = "", **parameters: float | bool
) -> list[CopyPrefix]:
    policy = Tailrace(PROFILE, copy_ahead=True, **parameters)
    seen = replace(view, hot=HotPrefixes(10.0, prefixes, frozenset(copying)))
    return [action for action in policy.on_tick(seen, 0.0) if isinstance(action, CopyPrefix)]


COPY = CopyPrefix("r-a", "a", "b", TOKENS, "hot prefix")
COSTS = Costs(StepModel.of_profile(PROFILE), 0.15)


def test_a_hot_prefix_is_copied_to_an_idle_instance() -> None:
    view = cluster(busy("a"), instance("b"), busy("c"))
    assert copies(view, hot(a=there())) == [COPY]


def test_a_copy_goes_to_the_cheapest_then_the_first_instance() -> None:
    view = replace(cluster(*map(instance, "abc")), hot=HotPrefixes(10.0, (hot(a=there()),), frozenset()))
    assert Copies(COSTS).plan(view, {"a": 9.0, "b": 0.1, "c": 0.1}) == [COPY]
    assert Copies(COSTS).plan(view, {"a": 9.0, "b": 0.2, "c": 0.1}) == [replace(COPY, target_id="c")]


# One token is a ten-thousandth of the transfer.
NEARLY = 1e-7


@pytest.mark.parametrize("own", [0, 5_000])
@pytest.mark.parametrize("rate", [None, 40_000.0])
def test_a_copy_saves_at_least_its_transfer_time(own: int, rate: float | None) -> None:
    """The saving is the shorter queue, or the computation that half as many future requests avoid."""
    target = replace(instance("b"), migration_tokens_per_s=rate)
    lacking = TOKENS - own
    transfer_s = COSTS.transfer_s(target, lacking) if rate is None else COSTS.open_s + lacking / rate
    prefix = replace(hot(hits=6, a=there()), cached={"a": there()} | ({"b": there(own)} if own else {}))
    view = replace(cluster(instance("a"), target), hot=HotPrefixes(10.0, (prefix,), frozenset()))

    def planned(copies: Copies, queue_s: float) -> list[CopyPrefix]:
        return copies.plan(view, {"a": 1.0 + queue_s, "b": 1.0})

    for times, found in ((1.0 - NEARLY, []), (1.0 + NEARLY, [COPY])):
        assert planned(Copies(COSTS), times * transfer_s) == found
    saved_s = 3 * (COSTS.nominal.compute_s(TOKENS) - COSTS.nominal.compute_s(own))
    for times, found in ((1.0 + NEARLY, []), (1.0 - NEARLY, [COPY])):
        assert planned(Copies(COSTS, times * saved_s / transfer_s), 9.0) == found


@pytest.mark.parametrize(
    "target",
    [
        instance("b", capacity=2 * TOKENS),
        replace(instance("b", capacity=2 * TOKENS + 500), prefill_backlog_tokens=500, waiting=1),
        replace(instance("b", capacity=2 * TOKENS + 500), coming_tokens=500),
    ],
    ids=["empty", "waiting prompt", "incoming request"],
)
def test_a_copy_needs_room_for_twice_its_size(target: InstanceView) -> None:
    assert copies(cluster(busy("a"), target), hot(a=there())) == [COPY]
    smaller = replace(target, kv_capacity_tokens=target.kv_capacity_tokens - 1)
    assert copies(cluster(busy("a"), smaller), hot(a=there())) == []


def test_another_holder_counts_from_half_of_the_prefix() -> None:
    view = cluster(busy("a"), instance("b"), busy("c"))
    assert copies(view, hot(a=there(), c=there(TOKENS // 2 - 1))) == [COPY]


def test_several_copies_have_different_targets_and_are_limited() -> None:
    view = cluster(*map(busy, "abcd"), *map(instance, "efgh"))
    every = hot(instances="abcdefgh")
    prefixes = [replace(every, cached={name: there()}, requests={name: f"r-{name}"}) for name in "abcd"]
    found = copies(view, *prefixes)
    assert [(copy.holder_id, copy.target_id) for copy in found] == [*zip("abcd", "efgh", strict=True)][
        :COPIES_MAX
    ]
    assert 1 < COPIES_MAX < 4


def test_prefixes_that_cannot_be_copied_do_not_block_others() -> None:
    view = cluster(busy("a"), instance("b"), busy("c"), instance("d"))
    every = hot(instances="abcd", a=there())
    rare, elsewhere = replace(every, hits=0), replace(every, cached={"c": there()}, requests={"c": "r-c"})
    second = CopyPrefix("r-c", "c", "d", TOKENS, "hot prefix")
    assert copies(view, rare, every) == [COPY]
    # Instance a sends a copy already.
    assert copies(view, every, every, elsewhere) == [COPY, second]


def test_prefixes_are_hot_by_the_arrivals_of_the_last_ten_seconds() -> None:
    assert Tailrace(PROFILE, copy_ahead=True).prefixes_period_s == 10.0


def test_copying_is_off_by_default() -> None:
    policy = Tailrace(PROFILE)
    assert policy.prefixes_period_s is None
    view = replace(cluster(busy("a"), instance("b")), hot=HotPrefixes(10.0, (hot(a=there()),), frozenset()))
    assert not policy.on_tick(view, 0.0)


@pytest.mark.parametrize(
    "prefix",
    [
        hot(a=there(), b=there()),
        hot(a=there(), c=there(TOKENS // 2)),
        # Being transferred.
        hot(a=there(), c=CachedTokens(TOKENS, TOKENS)),
        # Placed there but not reported yet.
        hot(a=CachedTokens(TOKENS, TOKENS)),
        hot(hits=0, a=there()),
        # The only other instance runs another model.
        hot(instances="a", a=there()),
        # No request begins with it.
        replace(hot(a=there()), requests={}),
    ],
)
def test_prefixes_that_are_not_copied(prefix: HotPrefix) -> None:
    assert copies(cluster(busy("a"), instance("b"), busy("c")), prefix) == []


@pytest.mark.parametrize(
    "view",
    [
        cluster(instance("a"), instance("b")),
        cluster(busy("a"), busy("b")),
        cluster(busy("a"), instance("b", capacity=TOKENS)),
        cluster(busy("a"), replace(instance("b"), migrations_in=1)),
        cluster(busy("a"), replace(instance("b"), state=InstanceState.DRAINING)),
        cluster(busy("a", state=InstanceState.SUSPECT), instance("b")),
        cluster(busy("a"), replace(instance("b"), migration_tokens_per_s=1_000.0)),
    ],
)
def test_clusters_without_a_suitable_target(view: ClusterView) -> None:
    assert copies(view, hot(a=there())) == []


def test_a_draining_instance_can_be_the_source() -> None:
    assert copies(cluster(busy("a", state=InstanceState.DRAINING), instance("b")), hot(a=there())) == [COPY]


def test_a_target_gets_one_copy_at_a_time() -> None:
    view = cluster(busy("a"), instance("b"), replace(instance("c"), prefill_backlog_tokens=100))
    assert copies(view, hot(a=there()), copying="b") == [replace(COPY, target_id="c")]
    assert copies(view, hot(a=there()), copying="bc") == []


@quick
@given(
    view=fleets(least=1),
    seed=st.integers(0, 1 << 20),
    margin=st.sampled_from((0.0, 1.0)),
)
def test_copies_are_limited_and_go_to_instances_without_the_prefix(
    view: ClusterView, seed: int, margin: float
) -> None:
    rng = random.Random(seed)
    names = sorted(view.instances)
    # Long queues make copies worthwhile.
    loaded = {
        name: replace(each, prefill_backlog_tokens=rng.choice((0, 40_000)), waiting=rng.randint(0, 3))
        for name, each in view.instances.items()
    }

    def held() -> CachedTokens:
        tokens = rng.choice((0, 2_000, TOKENS))
        return CachedTokens(tokens, tokens, rng.choice((0, tokens)))

    prefixes = []
    for number in range(rng.randint(0, 6)):
        cached = {name: held() for name in names if rng.random() < 0.4}
        requests = {name: f"r{number}-{name}" for name in names if rng.random() < 0.6}
        among = frozenset(name for name in names if rng.random() < 0.9)
        prefixes.append(HotPrefix(TOKENS, rng.randint(2, 40), cached, requests, among))
    copying = frozenset(name for name in names if rng.random() < 0.2)
    seen = replace(view, instances=loaded, hot=HotPrefixes(10.0, tuple(prefixes), copying))
    policy = Tailrace(PROFILE, copy_ahead=True, pull_margin=margin)
    actions = policy.on_tick(seen, 0.0)
    found = [action for action in actions if isinstance(action, CopyPrefix)]
    moved_to = {action.target_id for action in actions if isinstance(action, Migrate)}
    assert moved_to.isdisjoint(copy.target_id for copy in found)
    assert found == [action for action in policy.on_tick(seen, 0.0) if isinstance(action, CopyPrefix)]
    assert len(found) <= COPIES_MAX
    ends = [name for copy in found for name in (copy.holder_id, copy.target_id)]
    assert len(set(ends)) == len(ends) and not copying.intersection(ends)
    for copy in found:
        (prefix,) = [p for p in prefixes if p.requests.get(copy.holder_id) == copy.request_id]
        assert prefix.cached[copy.holder_id].reported == copy.tokens
        others = [held.device for name, held in prefix.cached.items() if name != copy.holder_id]
        assert all(2 * device < copy.tokens for device in others)
        assert loaded[copy.target_id].state is InstanceState.ACTIVE and copy.target_id in prefix.instances
