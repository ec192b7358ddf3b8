"""Book and follower agree eventually over a channel that loses, repeats, delays and reorders messages."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tailrace.cache import book as books
from tailrace.cache.book import CacheBook
from tailrace.cache.follow import CacheFollower, Change
from tailrace.cache.index import CacheIndex, Tier

NAMES = st.lists(st.integers(0, 12), max_size=6)
TIERS = st.sampled_from(Tier)


class BookToFollower(RuleBasedStateMachine):
    """A worker and a scheduler, both of which may restart, and a channel between them."""

    def __init__(self) -> None:
        super().__init__()
        self.incarnation = 0
        self.book = CacheBook()
        self.start_scheduler()
        # Updates and snapshots in flight: (incarnation, seq, changes).
        self.updates: list[tuple[str, int, Sequence[Change]]] = []
        self.snapshots: list[tuple[str, int, Sequence[Change]]] = []

    @rule()
    def start_scheduler(self) -> None:
        self.follower = CacheFollower(CacheIndex())
        self.set_members()

    @rule()
    def start_worker(self) -> None:
        self.incarnation += 1
        self.book = CacheBook()
        self.set_members()

    def set_members(self) -> None:
        self.follower.keep({"w": str(self.incarnation)})

    @rule(stored=NAMES, removed=NAMES, tier=TIERS)
    def change(self, stored: list[int], removed: list[int], tier: Tier) -> None:
        self.book.change(stored, removed, tier)

    @rule(tier=TIERS)
    def clear(self, tier: Tier) -> None:
        self.book.clear(tier)

    @rule()
    def overflow(self) -> None:
        before = books._PENDING_MAX
        books._PENDING_MAX = 0  # type: ignore[misc]
        try:
            self.book.change([1], [])
        finally:
            books._PENDING_MAX = before  # type: ignore[misc]

    @rule()
    def report(self) -> None:
        self.updates.append((str(self.incarnation), *self.book.take()))

    @precondition(lambda self: self.updates)
    @rule(data=st.data(), keep=st.booleans())
    def deliver(self, data: st.DataObject, keep: bool) -> None:
        at = data.draw(st.integers(0, len(self.updates) - 1))
        incarnation, seq, changes = self.updates[at] if keep else self.updates.pop(at)
        self.follower.update("w", incarnation, seq, changes)

    @precondition(lambda self: self.updates)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        self.updates.pop(data.draw(st.integers(0, len(self.updates) - 1)))

    @rule()
    def request_snapshot(self) -> None:
        self.snapshots.append((str(self.incarnation), *self.book.snapshot()))

    @precondition(lambda self: self.snapshots)
    @rule(data=st.data())
    def deliver_snapshot(self, data: st.DataObject) -> None:
        deliver_snapshot = self.snapshots.pop(data.draw(st.integers(0, len(self.snapshots) - 1)))
        self.follower.snapshot("w", *deliver_snapshot)

    @invariant()
    def converges(self) -> None:
        """Once pending updates arrive and wanted snapshots are fetched, both sides are equal."""
        settled = CacheFollower(CacheIndex())
        settled.__dict__ = _copied(self.follower)
        for update in (self.book.take(), self.book.take()):
            self.updates.append((str(self.incarnation), *update))
            settled.update("w", str(self.incarnation), *update)
        if settled.incomplete:
            settled.snapshot("w", str(self.incarnation), *self.book.snapshot())
        assert not settled.incomplete
        _, held = self.book.snapshot()
        expected = {change.tier: set(change.stored) for change in held}
        for tier in Tier:
            assert settled.index.names("w", tier) == expected.get(tier, set())


def _copied(follower: CacheFollower) -> dict[str, object]:
    from copy import deepcopy

    return deepcopy(follower.__dict__)


BookToFollower.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestBookToFollower = BookToFollower.TestCase


def test_updates_during_a_snapshot_request_are_not_lost() -> None:
    follower = CacheFollower(CacheIndex())
    follower.keep({"w": "a"})
    follower.update("w", "a", 5, [Change(Tier.DEVICE, [5])])
    assert follower.incomplete == ["w"]
    follower.update("w", "a", 6, [Change(Tier.DEVICE, [6], [1])])
    follower.snapshot("w", "a", 5, [Change(Tier.DEVICE, [1, 5])])
    assert follower.incomplete == [] and follower.index.names("w") == {5, 6}


def test_an_empty_update_reveals_a_gap() -> None:
    follower = CacheFollower(CacheIndex())
    follower.keep({"w": "a"})
    follower.update("w", "a", 0, [])
    assert follower.incomplete == []
    follower.update("w", "a", 1, [])
    assert follower.incomplete == ["w"]


def test_removed_instances_hold_nothing() -> None:
    follower = CacheFollower(CacheIndex())
    follower.keep({"w": "a", "v": "b"})
    follower.update("w", "a", 1, [Change(Tier.DEVICE, [1, 2])])
    follower.update("v", "b", 1, [Change(Tier.DEVICE, [1])])
    assert set(follower.index.match([1, 2])) == {"w", "v"}
    follower.keep({"v": "b"})
    assert set(follower.index.match([1, 2])) == {"v"}
    follower.keep({"v": "c"})
    assert not follower.index.match([1, 2])
