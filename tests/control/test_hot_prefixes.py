"""Hot prefixes, their holders, and copies in progress."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.actuator import _COPY_S
from tailrace.actions import CopyPrefix
from tailrace.cache.recent import common_blocks
from tailrace.cluster import Arrival, CachedTokens, HotPrefix
from tailrace.control.hot_prefixes import HotTracker

BLOCK = 16
PERIOD_S = 10.0
FOUR = (1, 2, 3, 4)


@dataclass
class KnownCluster:
    """A cluster with instances `a`, `b` and `c` of one model, and `x` of another."""

    where: dict[str, str] = field(default_factory=dict)
    # Names of the blocks that each instance holds.
    blocks: dict[str, Sequence[int]] = field(default_factory=dict)
    # Additional tokens in host memory.
    host: dict[str, int] = field(default_factory=dict)

    def located(self, request_id: str) -> str | None:
        return self.where.get(request_id)

    def held(self, names: Sequence[int], block_tokens: int, now_s: float) -> Mapping[str, CachedTokens]:
        found = {name: common_blocks(names, its) * block_tokens for name, its in self.blocks.items()}
        return {name: CachedTokens(n, n + self.host.get(name, 0), n) for name, n in found.items() if n}

    def exchanging(self, instance_id: str) -> Collection[str]:
        return {"x"} if instance_id == "x" else {"a", "b", "c"}


class Rig:
    """A tracker that is enabled by its policy."""

    def __init__(self, period_s: float | None = PERIOD_S) -> None:
        self.known = KnownCluster()
        self.tracker = HotTracker(self.known)
        self.tracker.track(period_s)

    def arrive(self, name: str, where: str, names: Sequence[int], at_s: float = 0.0) -> None:
        """Add a request and its blocks to an instance."""
        self.tracker.arrived(Arrival(name, 100, 100, block_names=names, block_tokens=BLOCK), at_s)
        self.known.where[name] = where
        self.known.blocks[where] = names

    def order(self, target: str, name: str = "q", tokens: int = 64, at_s: float = 0.0) -> bool:
        """Add a copy if it is allowed; return whether it is."""
        copy = CopyPrefix(name, "a", target, tokens, "test")
        if not self.tracker.may_copy(copy, at_s):
            return False
        self.tracker.add_copy(copy, at_s)
        return True

    def copying(self, now_s: float) -> frozenset[str]:
        hot = self.tracker.view(now_s)
        assert hot is not None
        return hot.copying

    def hottest(self, now_s: float = 0.0) -> HotPrefix:
        hot = self.tracker.view(now_s)
        assert hot is not None
        return hot.prefixes[0]


def two_requests(names: Sequence[int] = FOUR) -> Rig:
    """Return a tracker with two requests on `a` that share a prefix."""
    rig = Rig()
    rig.arrive("r", "a", names)
    rig.arrive("q", "a", names)
    return rig


def test_nothing_is_counted_until_a_policy_requires_it() -> None:
    rig = Rig(None)
    rig.arrive("r", "a", FOUR)
    rig.arrive("q", "a", FOUR)
    assert rig.tracker.view(0.0) is None and rig.tracker.recent is None
    assert not rig.order("b")
    rig.tracker.track(PERIOD_S)
    hot = rig.tracker.view(0.0)
    assert hot is not None and (hot.period_s, hot.prefixes) == (PERIOD_S, ())


def test_counts_are_dropped_when_disabled_or_for_another_period() -> None:
    rig = two_requests()
    rig.tracker.track(PERIOD_S)
    assert rig.hottest().hits == 2
    rig.tracker.track(PERIOD_S + 1)
    hot = rig.tracker.view(0.0)
    assert hot is not None and (hot.period_s, hot.prefixes) == (PERIOD_S + 1, ())
    rig.tracker.track(None)
    assert rig.tracker.view(0.0) is None


def test_a_request_placed_again_counts_once() -> None:
    """It was counted on arrival; the loss of its instance does not make its prefix hotter."""
    rig = two_requests()
    again = Arrival("r", 100, 100, 1, block_names=FOUR, block_tokens=BLOCK, admitted=True)
    rig.tracker.arrived(again, 1.0)
    assert rig.hottest(1.0).hits == 2


def test_the_latest_request_on_each_instance_is_listed() -> None:
    rig = Rig()
    for number, where in enumerate("aab"):
        rig.arrive(f"r{number}", where, FOUR, float(number))
    assert rig.hottest(2.0).requests == {"a": "r1", "b": "r2"}
    # The request has finished or migrated.
    del rig.known.where["r1"]
    assert rig.hottest(2.0).requests == {"a": "r0", "b": "r2"}
    rig.known.where.clear()
    hot = rig.tracker.view(2.0)
    assert hot is not None and hot.prefixes == ()


def test_instances_of_other_models_are_excluded() -> None:
    """Equal tokens have equal names there, but different KV."""
    rig = two_requests()
    rig.arrive("p", "x", FOUR)
    del rig.known.where["p"]
    prefix = rig.hottest()
    assert (prefix.tokens, set(prefix.cached), prefix.instances) == (64, {"a"}, frozenset("abc"))
    # The instance of the latest request determines the model.
    rig.known.where["p"] = "x"
    prefix = rig.hottest()
    assert (prefix.requests, set(prefix.cached), prefix.instances) == ({"x": "p"}, {"x"}, frozenset("x"))


def test_prefixes_are_sorted_by_weight_and_limited() -> None:
    rig = Rig()
    for number in range(100):
        for twice in range(2):
            rig.arrive(f"r{number}-{twice}", "a", range(1_000 * number, 1_001 * number + 1))
    hot = rig.tracker.view(0.0)
    assert hot is not None
    lengths = [prefix.tokens // BLOCK for prefix in hot.prefixes]
    assert lengths == list(range(100, 100 - len(lengths), -1)) and 1 < len(lengths) < 50


# ---- copies


def test_a_copy_in_progress_counts_as_cached_but_not_as_reported() -> None:
    rig = two_requests()
    rig.known.blocks["c"] = FOUR[:1]
    for target in "bc":
        assert rig.order(target)
    assert rig.hottest().cached == {
        "a": CachedTokens(64, 64, 64),
        "b": CachedTokens(64, 64, 0),
        "c": CachedTokens(64, 64, 16),
    }


def test_a_copy_of_another_prefix_does_not_count() -> None:
    rig = two_requests()
    rig.arrive("p", "c", (9, 10))
    assert rig.order("b", name="p", tokens=32)
    assert set(rig.hottest().cached) == {"a"}


def test_a_shorter_copy_does_not_hide_reported_tokens() -> None:
    rig = two_requests()
    rig.known.blocks["b"] = FOUR
    assert rig.order("b", tokens=32)
    assert rig.hottest().cached["b"] == CachedTokens(64, 64, 64)


@given(st.integers(0, 80))
def test_whole_blocks_are_copied(tokens: int) -> None:
    rig = two_requests()
    assert rig.order("b", tokens=tokens)
    (copy,) = rig.tracker.copies
    assert copy.names == FOUR[: tokens // BLOCK]
    cached = rig.hottest().cached
    assert cached.get("b", CachedTokens(0, 0)).device == min(64, tokens // BLOCK * BLOCK)


def test_tokens_in_host_memory_still_count_during_a_copy() -> None:
    rig = two_requests()
    rig.known.blocks["b"], rig.known.host["b"] = FOUR[:1], 80
    assert rig.order("b")
    assert rig.hottest().cached["b"] == CachedTokens(64, 96, 16)


def test_one_copy_per_target_and_only_of_known_requests() -> None:
    rig = two_requests()
    assert rig.order("b") and not rig.order("b")
    assert rig.order("c")
    assert not rig.order("a", name="unknown")
    assert rig.copying(0.0) == {"b", "c"}


def test_a_copy_counts_until_its_deadline() -> None:
    rig = two_requests()
    assert rig.order("b", at_s=1.0)
    (copy,) = rig.tracker.copies
    assert copy.until_s > 1.0 + _COPY_S
    before_s = copy.until_s - 0.001
    assert rig.copying(before_s) == {"b"} and not rig.order("b", at_s=before_s)
    assert rig.copying(copy.until_s) == frozenset() and rig.tracker.copies == []


def test_a_finished_copy_counts_until_it_is_reported() -> None:
    rig = two_requests()
    assert rig.order("b")
    rig.tracker.end_copy("b", 5.0)
    rig.tracker.end_copy("c", 5.0)
    (copy,) = rig.tracker.copies
    assert (copy.target_id, copy.names) == ("b", FOUR)
    # Long enough for a few reports, which workers send at least every second.
    assert 1.0 < copy.until_s - 5.0 < PERIOD_S
    assert rig.copying(copy.until_s - 0.001) == {"b"}
    # Afterwards another copy is accepted, even without a view in between.
    assert rig.order("b", at_s=copy.until_s)


def test_the_tracker_is_restored_from_a_recording() -> None:
    rig = two_requests()
    assert rig.order("b")
    following = HotTracker(rig.known)
    following.restore(rig.tracker.recent, rig.tracker.copies)
    assert following.view(1.0) == rig.tracker.view(1.0)
    assert not following.may_copy(CopyPrefix("q", "a", "b", 64, "test"), 1.0)
