"""The tailrace policy: when a prefix is pulled from another instance."""

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
    """Return tokens that the instance has reported."""
    return CachedTokens(tokens, tokens, tokens)


def busy(name: str) -> InstanceView:
    """Return an instance with a queue of seconds."""
    return replace(instance(name), waiting=4, prefill_backlog_tokens=60_000)


def placed(view: ClusterView, arriving: Arrival, **parameters: float | bool) -> Place:
    placement = Tailrace(PROFILE, **parameters).place(view, arriving, 0.0)
    assert isinstance(placement, Place)
    return placement


def test_a_request_on_the_holder_needs_no_pull() -> None:
    assert placed(cluster(instance("a"), instance("b")), arrival(a=there())) == Place("a")


def test_a_busy_holder_is_avoided_and_the_prefix_pulled() -> None:
    view = cluster(busy("a"), instance("b"))
    assert placed(view, arrival(a=there())) == Place("b", pull_from="a")
    assert placed(view, arrival(a=there()), pulls=False) == Place("b")


@pytest.mark.parametrize(("rate", "pull_from"), [(1e3, ""), (1e6, "a")])
def test_a_link_measured_as_slow_is_not_used(rate: float, pull_from: str) -> None:
    """Computing 12,000 tokens takes 0.3 s."""
    view = cluster(busy("a"), replace(instance("b"), migration_tokens_per_s=rate))
    assert placed(view, arrival(a=there())) == Place("b", pull_from=pull_from)


def test_a_pull_must_save_its_margin() -> None:
    view = cluster(busy("a"), replace(instance("b"), migration_tokens_per_s=100_000.0))
    assert placed(view, arrival(a=there())).pull_from == "a"
    assert placed(view, arrival(a=there()), pull_margin=10.0).pull_from == ""
    slow = cluster(busy("a"), replace(instance("b"), migration_tokens_per_s=1_000.0))
    assert placed(slow, arrival(a=there()), pull_margin=0.0).pull_from == "a"


def test_an_unreported_prefix_cannot_be_pulled() -> None:
    assert placed(cluster(busy("a"), instance("b")), arrival(a=CachedTokens(HELD, HELD))).pull_from == ""


def test_a_draining_instance_can_be_pulled_from_but_a_suspect_one_cannot() -> None:
    draining = replace(busy("a"), state=InstanceState.DRAINING)
    suspect = replace(busy("a"), state=InstanceState.SUSPECT)
    arriving = arrival(frozenset({"a"}), a=there())
    assert placed(cluster(draining, instance("b")), arriving) == Place("b", pull_from="a")
    for view in (cluster(suspect, instance("b")), cluster(busy("a"), instance("b"))):
        assert placed(view, arriving) == Place("b")


def test_host_memory_can_be_pulled_from_and_needs_no_pull_itself() -> None:
    view = cluster(busy("a"), instance("b"))
    in_host = CachedTokens(0, HELD, HELD)
    assert placed(view, arrival(a=in_host)) == Place("b", pull_from="a")
    assert placed(view, arrival(a=there(), b=in_host)) == Place("b")
    # A tenth is loaded from host memory and the rest is pulled.
    assert placed(view, arrival(a=there(), b=CachedTokens(0, HELD // 10, 0))) == Place("b", pull_from="a")


def test_the_instance_with_the_longest_prefix_is_pulled_from() -> None:
    view = cluster(busy("a"), busy("b"), instance("c"))
    arriving = arrival(a=there(4_000), b=there(), c=there(2_000))
    assert placed(view, arriving) == Place("c", pull_from="b")
    assert placed(view, arrival(a=there(4_000), c=there(4_000))) == Place("c")
