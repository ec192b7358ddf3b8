"""The index of blocks, compared with a model of plain sets."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tailrace.cache.index import CacheIndex, HeldBlocks, Tier

NAMES = st.integers(0, 40)
INSTANCES = st.sampled_from([f"i{n}" for n in range(40)])
TIERS = st.sampled_from(Tier)


def naive(held: dict[str, dict[Tier, set[int]]], names: Sequence[int]) -> dict[str, HeldBlocks]:
    """Return the matches, computed block by block."""
    found = {}
    for instance, tiers in held.items():
        device = total = 0
        for name in names:
            if name not in tiers[Tier.DEVICE]:
                break
            device += 1
        for name in names:
            if name not in tiers[Tier.DEVICE] and name not in tiers[Tier.HOST]:
                break
            total += 1
        if total:
            found[instance] = HeldBlocks(device, total)
    return found


class IndexAgainstSets(RuleBasedStateMachine):
    """Apply changes in any order, including repeated and unknown ones."""

    def __init__(self) -> None:
        super().__init__()
        self.index = CacheIndex()
        self.held: dict[str, dict[Tier, set[int]]] = {}

    def held_by(self, instance: str) -> dict[Tier, set[int]]:
        return self.held.setdefault(instance, {tier: set() for tier in Tier})

    @rule(instance=INSTANCES, stored=st.lists(NAMES), removed=st.lists(NAMES), tier=TIERS)
    def change(self, instance: str, stored: list[int], removed: list[int], tier: Tier) -> None:
        self.index.change(instance, stored, removed, tier)
        self.held_by(instance)[tier] |= set(stored)
        self.held_by(instance)[tier] -= set(removed)

    @rule(names=st.lists(NAMES), instances=st.sets(INSTANCES, min_size=1))
    def share(self, names: list[int], instances: set[str]) -> None:
        for instance in instances:
            self.change(instance, names, [], Tier.DEVICE)

    @rule(instance=INSTANCES, names=st.lists(NAMES), tier=TIERS)
    def replace(self, instance: str, names: list[int], tier: Tier) -> None:
        self.index.replace(instance, names, tier)
        self.held_by(instance)[tier] = set(names)

    @rule(instance=INSTANCES)
    def forget(self, instance: str) -> None:
        self.index.forget(instance)
        self.held.pop(instance, None)

    @rule(names=st.lists(NAMES, unique=True))
    def match(self, names: list[int]) -> None:
        assert dict(self.index.match(names)) == naive(self.held, names)

    @invariant()
    def counts(self) -> None:
        for instance, tiers in self.held.items():
            for tier, names in tiers.items():
                assert self.index.count(instance, tier) == len(names)
                assert self.index.names(instance, tier) == names
        everything = [tiers[Tier.DEVICE] for tiers in self.held.values()]
        assert len(self.index) == len(set[int]().union(*everything))


IndexAgainstSets.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestIndexAgainstSets = IndexAgainstSets.TestCase


def test_names_beyond_the_bound_are_counted_but_not_recorded() -> None:
    index = CacheIndex(names_max=3)
    index.change("a", [1, 2, 3, 4], [])
    index.change("b", [1, 4], [])
    assert index.names("a") == {1, 2, 3} and index.names("b") == {1}
    assert index.refused == 2
    index.change("a", [], [4, 2])
    index.change("b", [9], [])
    assert index.names("a") == {1, 3} and index.names("b") == {1, 9}


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3_000)), max_size=200))
@settings(max_examples=20, deadline=None)
def test_the_list_of_names_is_compacted(changes: list[tuple[bool, int]]) -> None:
    index = CacheIndex()
    for _ in range(30):
        for stored, name in changes:
            index.change("a", [name] if stored else [], [] if stored else [name])
    slots = index._device._slots
    assert all(len(slot.names) <= 2 * slot.count + 1_025 for slot in slots.values())
