"""Prefix caches known from reports, as placements see them."""

from __future__ import annotations

from tailrace.cluster import Arrival, CachedTokens
from tailrace.control.reported_cluster import ReportedCluster
from tailrace.v1 import cache_pb2
from tests.scheduler.facts import members, report_to, set_members, steady

BLOCK = 16
NAMES = [11, 12, 13, 14]


def report_stored(state: ReportedCluster, name: str, seq: int, stored: list[int]) -> None:
    report = steady(name)
    report.cache.seq = seq
    if stored:
        report.cache.changes.add(tier=cache_pb2.CACHE_TIER_DEVICE, stored=stored)
    report_to(state, report, 0.0)


def lookup(state: ReportedCluster, prompt_tokens: int = 100, now_s: float = 0.0) -> dict[str, CachedTokens]:
    return dict(state.cache.of_arrival(NAMES, BLOCK, prompt_tokens, now_s))


def test_reports_update_the_cache_and_a_listing_repairs_gaps() -> None:
    state = ReportedCluster()
    set_members(state, members("a", "b"), 0.0)
    assert lookup(state) == {}
    report_stored(state, "a", 1, NAMES[:2])
    report_stored(state, "b", 1, NAMES)
    assert lookup(state) == {"a": CachedTokens(32, 32, 32), "b": CachedTokens(64, 64, 64)}
    # The last token is always computed.
    assert lookup(state, prompt_tokens=64)["b"] == CachedTokens(63, 63, 63)
    report_stored(state, "a", 3, NAMES[3:])
    assert state.cache.follower.incomplete == ["a"]
    incarnation = state.cache.follower._followed["a"].incarnation
    listing = cache_pb2.ListCacheReply(incarnation=incarnation, seq=2)
    listing.held.add(tier=cache_pb2.CACHE_TIER_HOST, stored=NAMES[2:3])
    listing.held.add(tier=cache_pb2.CACHE_TIER_DEVICE, stored=NAMES[:2])
    state.cache.listed("a", listing)
    assert state.cache.follower.incomplete == []
    # Host memory can be pulled from, too.
    assert lookup(state)["a"] == CachedTokens(32, 64, 64)
    set_members(state, members("b"), 0.0)
    assert set(lookup(state)) == {"b"}


def test_a_placement_counts_its_remaining_prefill_and_updates_the_cache() -> None:
    state = ReportedCluster()
    set_members(state, members("a", "b"), 0.0)
    report_stored(state, "a", 1, NAMES)
    cached = state.cache.of_arrival(NAMES, BLOCK, 100, 0.0)
    state.place(Arrival("r", 100, 10, 0, cached=cached, block_names=NAMES), "a", 0.0)
    state.place(Arrival("s", 100, 10, 0, cached=cached, block_names=NAMES), "b", 0.0)
    view = state.view()
    assert view.instances["a"].prefill_backlog_tokens == 36
    assert view.instances["b"].prefill_backlog_tokens == 100
    # Nothing can be pulled from b before it reports the blocks.
    assert lookup(state)["b"] == CachedTokens(64, 64, 0)
    assert set(lookup(state, now_s=3.0)) == {"a"}
