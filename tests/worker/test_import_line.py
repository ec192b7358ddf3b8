"""Imports get room in the order in which they asked for it, whoever gives up meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from worker_agent.engine.base import RequestKey
from worker_agent.engine.errors import EngineRefusal, NoRoom
from worker_agent.engine.import_line import ImportLine

CAPACITY = 10
ACTION = st.one_of(
    st.tuples(st.just("join"), st.integers(1, CAPACITY)),
    st.tuples(st.just("free"), st.integers(1, 4)),
    st.tuples(st.just("leave"), st.integers(0, 20)),
    st.tuples(st.just("fail"), st.integers(0, 20)),
)


class Room:
    """What the engine has free, who asked for how much of it, and what they were told."""

    def __init__(self) -> None:
        self.free = 0
        self.line = ImportLine()
        self.sizes: list[int] = []
        self.failing: set[int] = set()
        self.told: dict[int, EngineRefusal | None] = {}
        self.granted: list[int] = []

    def join(self, size: int) -> None:
        number = len(self.sizes)
        self.sizes.append(size)

        def take() -> None:
            if number in self.failing:
                raise EngineRefusal("for a test")
            if size > self.free:
                raise NoRoom("for a test")
            self.free -= size
            self.granted.append(number)

        def done(refusal: EngineRefusal | None) -> None:
            assert number not in self.told
            self.told[number] = refusal

        self.line.join(str(number), RequestKey(number % 2, number), take, done)


@given(st.lists(ACTION, max_size=40))
def test_room_is_given_in_order_and_everybody_is_told_once(actions: Sequence[tuple[str, int]]) -> None:
    room = Room()
    left: set[int] = set()
    for action, number in actions:
        match action:
            case "join":
                room.join(number)
            case "free":
                room.free = min(CAPACITY, room.free + number)
            case "leave":
                if str(number) in room.line:
                    left.add(number)
                room.line.leave(str(number))
            case "fail":
                room.failing.add(number)
        room.line.admit()
        waiting = [n for n in range(len(room.sizes)) if str(n) in room.line]
        assert sorted([*waiting, *room.told]) == list(range(len(room.sizes)))
        # Whoever is first has no room, or would have it.
        assert not waiting or room.sizes[waiting[0]] > room.free
    assert room.granted == sorted(room.granted)
    assert {n for n, refusal in room.told.items() if refusal is None} == set(room.granted)
    assert left <= {n for n, refusal in room.told.items() if refusal is not None}
    for number in (0, 1):
        room.line.leave_client(number)
    assert len(room.line) == 0
    assert len(room.told) == len(room.sizes)
