"""Our own policy: when a prefix is fetched from whoever holds it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tailrace.actions import Place
from tailrace.cluster import Arrival, CachedTokens, ClusterView, InstanceState, InstanceView
from tailrace.policy.tailrace.policy import Tailrace
from tailrace.profiles import load_profile
from tests.policy.fleets import cluster, instance

PROFILE = load_profile("llama-3.1-8b-h100")
HELD = 12_000


def arrival(excluded: frozenset[str] = frozenset(), **cached: CachedTokens) -> Arrival:
    return Arrival("r", HELD + 500, 100, 0, excluded=excluded, cached=cached)


def there(tokens: int = HELD) -> CachedTokens:
    """Told of."""
    return CachedTokens(tokens, tokens, tokens)


def busy(name: str) -> InstanceView:
    """A queue of seconds."""
    return replace(instance(name), waiting=4, prefill_backlog_tokens=60_000)


def placed(view: ClusterView, asked: Arrival, **parameters: float | bool) -> Place:
    placement = Tailrace(PROFILE, **parameters).place(view, asked, 0.0)  # type: ignore[arg-type]
    assert isinstance(placement, Place)
    return placement


def test_where_the_prefix_is_it_is_not_fetched() -> None:
    assert placed(cluster(instance("a"), instance("b")), arrival(a=there())) == Place("a")


def test_a_queue_is_left_and_the_prefix_comes_along() -> None:
    view = cluster(busy("a"), instance("b"))
    assert placed(view, arrival(a=there())) == Place("b", pull_from="a")
    assert placed(view, arrival(a=there()), pulls=False) == Place("b")


@pytest.mark.parametrize(("rate", "pull_from"), [(1e3, ""), (1e6, "a")])
def test_a_link_that_was_slow_of_late_is_not_used(rate: float, pull_from: str) -> None:
    """12,000 tokens take 0.3 s to compute."""
    view = cluster(busy("a"), replace(instance("b"), migration_tokens_per_s=rate))
    assert placed(view, arrival(a=there())) == Place("b", pull_from=pull_from)


def test_the_margin_says_how_much_it_must_save() -> None:
    view = cluster(busy("a"), replace(instance("b"), migration_tokens_per_s=100_000.0))
    assert placed(view, arrival(a=there())).pull_from == "a"
    assert placed(view, arrival(a=there()), pull_margin=10.0).pull_from == ""
    slow = cluster(busy("a"), replace(instance("b"), migration_tokens_per_s=1_000.0))
    assert placed(slow, arrival(a=there()), pull_margin=0.0).pull_from == "a"


def test_what_was_placed_a_moment_ago_cannot_be_fetched() -> None:
    assert placed(cluster(busy("a"), instance("b")), arrival(a=CachedTokens(HELD, HELD))).pull_from == ""


def test_one_that_drains_lends_and_one_that_is_out_of_reach_does_not() -> None:
    draining = replace(busy("a"), state=InstanceState.DRAINING)
    suspect = replace(busy("a"), state=InstanceState.SUSPECT)
    asked = arrival(frozenset({"a"}), a=there())
    assert placed(cluster(draining, instance("b")), asked) == Place("b", pull_from="a")
    for view in (cluster(suspect, instance("b")), cluster(busy("a"), instance("b"))):
        assert placed(view, asked) == Place("b")


def test_host_memory_lends_and_needs_no_pull_for_itself() -> None:
    view = cluster(busy("a"), instance("b"))
    in_host = CachedTokens(0, HELD, HELD)
    assert placed(view, arrival(a=in_host)) == Place("b", pull_from="a")
    assert placed(view, arrival(a=there(), b=in_host)) == Place("b")
    # A tenth of it is loaded, and the rest fetched.
    assert placed(view, arrival(a=there(), b=CachedTokens(0, HELD // 10, 0))) == Place("b", pull_from="a")


def test_who_holds_most_is_asked() -> None:
    view = cluster(busy("a"), busy("b"), instance("c"))
    asked = arrival(a=there(4_000), b=there(), c=there(2_000))
    assert placed(view, asked) == Place("c", pull_from="b")
    assert placed(view, arrival(a=there(4_000), c=there(4_000))) == Place("c")
