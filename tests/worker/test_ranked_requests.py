"""A line that is kept in order is the line sorted anew."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tailrace.intra.base import Rank
from worker_agent.engine.ranked_requests import RankedRequests


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(0, 20)),
            st.tuples(st.just("remove"), st.integers(0, 20)),
            st.tuples(st.just("wait"), st.integers(0, 5)),
        ),
        max_size=60,
    )
)
def test_as_sorted_anew(actions: list[tuple[str, int]]) -> None:
    lapsed: set[int] = set()
    now_s = 0.0

    def rank(member: int) -> Rank:
        return ((member * 7) % 11 + 100 * (member in lapsed), member)

    def lapses_s(member: int) -> float | None:
        return None if member in lapsed or member % 3 == 0 else float(member)

    line = RankedRequests(rank, lapses_s, lapsed.add)
    here: set[int] = set()
    for action, value in actions:
        if action == "add" and value not in here:
            here.add(value)
            line.add(value)
        elif action == "remove" and value in here:
            here.remove(value)
            line.remove(value)
        elif action == "wait":
            now_s += value
            line.advance(now_s)
            # Whoever is here has lapsed if its time has come.
            assert all(member in lapsed for member in here if member % 3 and member <= now_s)
        assert list(line) == sorted(here, key=rank)
        assert [entry[0] for entry in line.ranked()] == sorted(map(rank, here))
