"""Placements count as cached for a limited time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.cache import placed as module
from tailrace.cache.index import HeldBlocks
from tailrace.cache.placed import PlacedPrefixes, merge_placed


def test_a_placement_is_known_to_the_next_request_of_a_burst() -> None:
    placed = PlacedPrefixes()
    placed.place("a", [1, 2, 3], 0.0)
    assert placed.index.match([1, 2, 9]) == {"a": HeldBlocks(2, 2)}
    placed.forget(1.9)
    assert placed.index.match([1])
    placed.forget(2.1)
    assert not placed.index.match([1])


def test_the_longer_of_held_and_placed_counts() -> None:
    held = {"a": HeldBlocks(2, 6), "b": HeldBlocks(5, 5)}
    placed = {"a": HeldBlocks(4, 4), "b": HeldBlocks(3, 3), "c": HeldBlocks(1, 1)}
    assert merge_placed(held, placed) == {
        "a": HeldBlocks(4, 6),
        "b": HeldBlocks(5, 5),
        "c": HeldBlocks(1, 1),
    }


PLACEMENTS = st.lists(
    st.tuples(
        st.floats(0.0, 1.5), st.sampled_from("abc"), st.lists(st.integers(0, 9), max_size=6, unique=True)
    ),
    max_size=40,
)


@given(PLACEMENTS, st.sampled_from([10, 1_000]))
@settings(max_examples=80, deadline=None)
def test_only_recent_placements_count(placements: list[tuple[float, str, list[int]]], names_max: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_NAMES_MAX", names_max)
        placed = PlacedPrefixes()
        now_s = 0.0
        recent: list[tuple[float, str, list[int]]] = []
        for wait_s, instance, names in placements:
            now_s += wait_s
            placed.place(instance, names, now_s)
            recent.append((now_s, instance, names))
        recent = [each for each in recent if now_s - each[0] <= 2.0]
        while sum(len(names) for _, _, names in recent) > names_max:
            recent.pop(0)
        for instance in "abc":
            expected = {name for _, where, names in recent if where == instance for name in names}
            assert placed.index.names(instance) == expected
