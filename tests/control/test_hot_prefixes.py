"""Which prefixes are hot, where they are, and what copies of them are on their way."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.copies import _COPY_S
from tailrace.actions import CopyPrefix
from tailrace.cache.recent import common_blocks
from tailrace.cluster import Arrival, CachedTokens, HotPrefix
from tailrace.control.hot_prefixes import HotTracker

BLOCK = 16
PERIOD_S = 10.0
FOUR = (1, 2, 3, 4)


@dataclass
class Known:
    """Instances `a`, `b` and `c` of one model, `x` of another."""

    where: dict[str, str] = field(default_factory=dict)
    # What each holds: names of blocks.
    blocks: dict[str, Sequence[int]] = field(default_factory=dict)
    # Tokens that it has in host memory beside.
    host: dict[str, int] = field(default_factory=dict)

    def located(self, request_id: str) -> str | None:
        return self.where.get(request_id)

    def held(self, names: Sequence[int], block_tokens: int, now_s: float) -> Mapping[str, CachedTokens]:
        found = {name: common_blocks(names, its) * block_tokens for name, its in self.blocks.items()}
        return {name: CachedTokens(n, n + self.host.get(name, 0), n) for name, n in found.items() if n}

    def exchanging(self, instance_id: str) -> Collection[str]:
        return {"x"} if instance_id == "x" else {"a", "b", "c"}


class Rig:
    """A tracker whose policy wants to know."""

    def __init__(self, period_s: float | None = PERIOD_S) -> None:
        self.known = Known()
        self.tracker = HotTracker(self.known)
        self.tracker.track(period_s)

    def arrive(self, name: str, where: str, names: Sequence[int], at_s: float = 0.0) -> None:
        """A request comes, and its instance has it and its blocks."""
        self.tracker.arrived(Arrival(name, 100, 100, 0, block_names=names), BLOCK, at_s)
        self.known.where[name] = where
        self.known.blocks[where] = names

    def order(self, target: str, name: str = "q", tokens: int = 64, at_s: float = 0.0) -> bool:
        return self.tracker.add_copy(CopyPrefix(name, "a", target, tokens, "test"), at_s)

    def copying(self, now_s: float) -> frozenset[str]:
        hot = self.tracker.view(now_s)
        assert hot is not None
        return hot.copying

    def hottest(self, now_s: float = 0.0) -> HotPrefix:
        hot = self.tracker.view(now_s)
        assert hot is not None
        return hot.prefixes[0]


def shared(names: Sequence[int] = FOUR) -> Rig:
    """Two requests on `a` begin alike."""
    rig = Rig()
    rig.arrive("r", "a", names)
    rig.arrive("q", "a", names)
    return rig


def test_nothing_is_counted_until_a_policy_wants_to_know() -> None:
    rig = Rig(None)
    rig.arrive("r", "a", FOUR)
    rig.arrive("q", "a", FOUR)
    assert rig.tracker.view(0.0) is None and rig.tracker.recent is None
    assert not rig.order("b")
    rig.tracker.track(PERIOD_S)
    hot = rig.tracker.view(0.0)
    assert hot is not None and (hot.period_s, hot.prefixes) == (PERIOD_S, ())


def test_it_is_forgotten_once_nobody_wants_to_know_or_for_another_period() -> None:
    rig = shared()
    rig.tracker.track(PERIOD_S)
    assert rig.hottest().hits == 2
    rig.tracker.track(PERIOD_S + 1)
    hot = rig.tracker.view(0.0)
    assert hot is not None and (hot.period_s, hot.prefixes) == (PERIOD_S + 1, ())
    rig.tracker.track(None)
    assert rig.tracker.view(0.0) is None


def test_a_request_that_was_placed_before_has_not_come_again() -> None:
    """It was counted when it came; that its instance was lost makes its prefix no hotter."""
    rig = shared()
    again = Arrival("r", 100, 100, 1, block_names=FOUR, admitted=True)
    rig.tracker.arrived(again, BLOCK, 1.0)
    assert rig.hottest(1.0).hits == 2


def test_of_each_instance_the_latest_request_is_named() -> None:
    rig = Rig()
    for number, where in enumerate("aab"):
        rig.arrive(f"r{number}", where, FOUR, float(number))
    assert rig.hottest(2.0).requests == {"a": "r1", "b": "r2"}
    # It has ended, or moved.
    del rig.known.where["r1"]
    assert rig.hottest(2.0).requests == {"a": "r0", "b": "r2"}
    rig.known.where.clear()
    hot = rig.tracker.view(2.0)
    assert hot is not None and hot.prefixes == ()


def test_of_another_models_instances_nothing_is_shown() -> None:
    """The same tokens may have the same names there, and are other KV."""
    rig = shared()
    rig.arrive("p", "x", FOUR)
    del rig.known.where["p"]
    prefix = rig.hottest()
    assert (prefix.tokens, set(prefix.cached), prefix.instances) == (64, {"a"}, frozenset("abc"))
    # Where the latest request is decides of which model it is shown.
    rig.known.where["p"] = "x"
    prefix = rig.hottest()
    assert (prefix.requests, set(prefix.cached), prefix.instances) == ({"x": "p"}, {"x"}, frozenset("x"))


def test_the_heaviest_are_shown_first_and_few_of_many() -> None:
    rig = Rig()
    for number in range(100):
        for twice in range(2):
            rig.arrive(f"r{number}-{twice}", "a", range(1_000 * number, 1_001 * number + 1))
    hot = rig.tracker.view(0.0)
    assert hot is not None
    lengths = [prefix.tokens // BLOCK for prefix in hot.prefixes]
    assert lengths == list(range(100, 100 - len(lengths), -1)) and 1 < len(lengths) < 50


# ---- copies


def test_what_is_on_its_way_counts_as_there_and_not_as_told_of() -> None:
    rig = shared()
    rig.known.blocks["c"] = FOUR[:1]
    for target in "bc":
        assert rig.order(target)
    assert rig.hottest().cached == {
        "a": CachedTokens(64, 64, 64),
        "b": CachedTokens(64, 64, 0),
        "c": CachedTokens(64, 64, 16),
    }


def test_a_copy_of_another_prefix_is_none_of_this_one() -> None:
    rig = shared()
    rig.arrive("p", "c", (9, 10))
    assert rig.order("b", name="p", tokens=32)
    assert set(rig.hottest().cached) == {"a"}


def test_a_copy_of_less_than_is_there_hides_nothing() -> None:
    rig = shared()
    rig.known.blocks["b"] = FOUR
    assert rig.order("b", tokens=32)
    assert rig.hottest().cached["b"] == CachedTokens(64, 64, 64)


@given(st.integers(0, 80))
def test_whole_blocks_are_copied(tokens: int) -> None:
    rig = shared()
    assert rig.order("b", tokens=tokens)
    (copy,) = rig.tracker.copies
    assert copy.names == FOUR[: tokens // BLOCK]
    cached = rig.hottest().cached
    assert cached.get("b", CachedTokens(0, 0)).device == min(64, tokens // BLOCK * BLOCK)


def test_what_is_in_host_memory_stays_there_while_it_is_copied() -> None:
    rig = shared()
    rig.known.blocks["b"], rig.known.host["b"] = FOUR[:1], 80
    assert rig.order("b")
    assert rig.hottest().cached["b"] == CachedTokens(64, 96, 16)


def test_one_to_an_instance_at_a_time_and_of_what_is_known_alone() -> None:
    rig = shared()
    assert rig.order("b") and not rig.order("b")
    assert rig.order("c")
    assert not rig.order("a", name="unknown")
    assert rig.copying(0.0) == {"b", "c"}


def test_a_copy_counts_as_long_as_its_call_may_take_and_not_for_ever() -> None:
    rig = shared()
    assert rig.order("b", at_s=1.0)
    (copy,) = rig.tracker.copies
    assert copy.until_s > 1.0 + _COPY_S
    before_s = copy.until_s - 0.001
    assert rig.copying(before_s) == {"b"} and not rig.order("b", at_s=before_s)
    assert rig.copying(copy.until_s) == frozenset() and rig.tracker.copies == []


def test_what_has_ended_counts_until_it_is_told_of() -> None:
    rig = shared()
    assert rig.order("b")
    rig.tracker.end_copy("b", 5.0)
    rig.tracker.end_copy("c", 5.0)
    (copy,) = rig.tracker.copies
    assert (copy.target_id, copy.names) == ("b", FOUR)
    # A few reports of workers, which come every second at least.
    assert 1.0 < copy.until_s - 5.0 < PERIOD_S
    assert rig.copying(copy.until_s - 0.001) == {"b"}
    # Another one is taken then, without anybody having looked meanwhile.
    assert rig.order("b", at_s=copy.until_s)


def test_it_goes_on_from_a_recording() -> None:
    rig = shared()
    assert rig.order("b")
    following = HotTracker(rig.known)
    following.restore(rig.tracker.recent, rig.tracker.copies)
    assert following.view(1.0) == rig.tracker.view(1.0)
    assert not following.add_copy(CopyPrefix("q", "a", "b", 64, "test"), 1.0)
