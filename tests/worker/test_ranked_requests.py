"""The incrementally sorted requests equal a newly sorted list."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tailrace.intra.base import Rank
from worker_agent.engine.turns import RankedRequests


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
def test_order_equals_a_new_sort(actions: list[tuple[str, int]]) -> None:
    lapsed: set[int] = set()
    now_s = 0.0

    def rank(member: int) -> Rank:
        return ((member * 7) % 11 + 100 * (member in lapsed), member)

    def lapses_s(member: int) -> float | None:
        return None if member in lapsed or member % 3 == 0 else float(member)

    requests = RankedRequests(rank, lapses_s, lapsed.add)
    members: set[int] = set()
    for action, value in actions:
        if action == "add" and value not in members:
            members.add(value)
            requests.add(value)
        elif action == "remove" and value in members:
            members.remove(value)
            requests.remove(value)
        elif action == "wait":
            now_s += value
            requests.advance(now_s)
            # All members that are due have lapsed.
            assert all(member in lapsed for member in members if member % 3 and member <= now_s)
        assert list(requests) == sorted(members, key=rank)
        assert [entry[0] for entry in requests.ranked()] == sorted(map(rank, members))
