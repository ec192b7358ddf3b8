"""Imports get room in order of arrival, even if some are removed meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from worker_agent.engine.base import RequestKey
from worker_agent.engine.errors import EngineRefusal, NoRoom
from worker_agent.engine.import_queue import ImportQueue

CAPACITY = 10
ACTION = st.one_of(
    st.tuples(st.just("add"), st.integers(1, CAPACITY)),
    st.tuples(st.just("free"), st.integers(1, 4)),
    st.tuples(st.just("remove"), st.integers(0, 20)),
    st.tuples(st.just("fail"), st.integers(0, 20)),
)


class Room:
    """An engine's free blocks, the sizes of the imports, and their results."""

    def __init__(self) -> None:
        self.free = 0
        self.queue = ImportQueue()
        self.sizes: list[int] = []
        self.failing: set[int] = set()
        self.results: dict[int, EngineRefusal | None] = {}
        self.granted: list[int] = []

    def add(self, size: int) -> None:
        number = len(self.sizes)
        self.sizes.append(size)

        def reserve() -> None:
            if number in self.failing:
                raise EngineRefusal("for a test")
            if size > self.free:
                raise NoRoom("for a test")
            self.free -= size
            self.granted.append(number)

        def on_done(refusal: EngineRefusal | None) -> None:
            assert number not in self.results
            self.results[number] = refusal

        self.queue.add(str(number), RequestKey(number % 2, number), reserve, on_done)


@given(st.lists(ACTION, max_size=40))
def test_room_is_granted_in_order_and_each_import_has_one_result(actions: Sequence[tuple[str, int]]) -> None:
    room = Room()
    removed: set[int] = set()
    for action, number in actions:
        match action:
            case "add":
                room.add(number)
            case "free":
                room.free = min(CAPACITY, room.free + number)
            case "remove":
                if str(number) in room.queue:
                    removed.add(number)
                room.queue.remove(str(number))
            case "fail":
                room.failing.add(number)
        room.queue.admit()
        waiting = [n for n in range(len(room.sizes)) if str(n) in room.queue]
        assert sorted([*waiting, *room.results]) == list(range(len(room.sizes)))
        # The first import waits only if there is no room for it.
        assert not waiting or room.sizes[waiting[0]] > room.free
    assert room.granted == sorted(room.granted)
    assert {n for n, refusal in room.results.items() if refusal is None} == set(room.granted)
    assert removed <= {n for n, refusal in room.results.items() if refusal is not None}
    for number in (0, 1):
        room.queue.remove_client(number)
    assert len(room.queue) == 0
    assert len(room.results) == len(room.sizes)


def test_an_import_that_fails_is_refused_and_the_next_one_goes_on() -> None:
    queue, results = ImportQueue(), list[tuple[str, EngineRefusal | None]]()

    def fail() -> None:
        raise ArithmeticError("of a device")

    queue.add("bad", RequestKey(0, 0), fail, lambda refusal: results.append(("bad", refusal)))
    queue.add("good", RequestKey(0, 1), lambda: None, lambda refusal: results.append(("good", refusal)))
    queue.admit()
    assert [name for name, _ in results] == ["bad", "good"]
    assert "of a device" in str(results[0][1]) and results[1][1] is None
