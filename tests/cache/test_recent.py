"""Shared prefixes of recent arrivals, compared with a pairwise computation."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tailrace.cache.recent import ARRIVALS_MAX, PrefixArrival, RecentPrefixes, common_blocks


def names_of(path: list[int]) -> list[int]:
    """Return a name for each block, which identifies all blocks up to it."""
    return [hash(tuple(path[: n + 1])) for n in range(len(path))]


@st.composite
def prompts(draw: st.DrawFn) -> list[list[int]]:
    paths = draw(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), max_size=12))
    return [names_of(path) for path in paths]


@given(prompts())
def test_found_prefixes_are_shared_by_several_arrivals(prompt_names: list[list[int]]) -> None:
    recent = RecentPrefixes(10.0)
    for number, names in enumerate(prompt_names):
        recent.arrived(PrefixArrival(float(number) / 100, f"r{number}", names, 16))
    found = recent.shared(1.0, 100)
    for prefix in found:
        names = list(prefix.names)
        assert names and len(prefix.arrivals) > 1
        # All arrivals that begin with it, the latest first; they have nothing more in common.
        having = [f"r{n}" for n, each in enumerate(prompt_names) if each[: len(names)] == names]
        assert [arrival.request_id for arrival in prefix.arrivals] == having[::-1]
        longer = {tuple(a.names[: len(names) + 1]) for a in prefix.arrivals}
        assert len(longer) > 1 or all(len(a.names) == len(names) for a in prefix.arrivals)
    assert [p.weight for p in found] == sorted((p.weight for p in found), reverse=True)
    assert len({tuple(p.names) for p in found}) == len(found)
    # The prefix that two arrivals share is found with at least half of its length.
    for one in range(len(prompt_names)):
        for other in range(one):
            shared = common_blocks(prompt_names[one], prompt_names[other])
            assert not shared or any(
                2 * common_blocks(p.names, prompt_names[one]) > shared
                and prompt_names[one][: len(p.names)] == list(p.names)
                for p in found
            )


def test_old_and_excess_arrivals_are_dropped() -> None:
    recent = RecentPrefixes(10.0)
    for number in range(ARRIVALS_MAX + 5):
        recent.arrived(PrefixArrival(number / 1_000, f"r{number}", [1, 2], 16))
    assert len(recent.arrivals) == ARRIVALS_MAX and recent.find("r4") is None
    (prefix,) = recent.shared(5.0, 4)
    assert (len(prefix.arrivals), prefix.tokens) == (ARRIVALS_MAX, 32)
    assert recent.shared(11.0, 4) == [] and recent.arrivals == []


def test_each_arrival_expires_after_the_period() -> None:
    recent = RecentPrefixes(10.0)
    for at_s in (0.0, 4.0, 8.0):
        recent.arrived(PrefixArrival(at_s, f"r{at_s:g}", [1], 1))
    (all_of_them,) = recent.shared(10.0, 4)
    assert (len(all_of_them.arrivals), all_of_them.tokens) == (3, 1)
    (later,) = recent.shared(10.1, 4)
    assert [arrival.request_id for arrival in later.arrivals] == ["r8", "r4"]
    # A single arrival shares nothing.
    assert recent.shared(14.1, 4) == [] and len(recent.arrivals) == 1
    recent.arrived(PrefixArrival(20.0, "r20", [1], 1))
    assert [arrival.request_id for arrival in recent.arrivals] == ["r20"]


def test_the_number_of_prefixes_is_limited() -> None:
    recent = RecentPrefixes(10.0)
    for name in (3, 1, 2):
        for repeat in range(2 + (name == 2)):
            recent.arrived(PrefixArrival(0.0, f"r{name}{repeat}", [name], 16))
    # The heaviest come first; ties have a fixed order.
    assert [prefix.names for prefix in recent.shared(0.0, 9)] == [[2], [1], [3]]
    assert [prefix.names for prefix in recent.shared(0.0, 2)] == [[2], [1]]


def test_a_prompt_without_names_is_ignored() -> None:
    recent = RecentPrefixes(10.0)
    recent.arrived(PrefixArrival(0.0, "r", [], 16))
    recent.arrived(PrefixArrival(0.0, "q", [1], 0))
    assert recent.arrivals == []
