"""One pool of host memory: never more than there is, requests before kept blocks, no slot given twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from worker_agent.engine.host_ledger import HostLedger

TOTAL = 8
NAMES = st.sampled_from([bytes([n]) for n in range(12)])


class OnePool(RuleBasedStateMachine):
    """Against a model that knows who has what, and when each kept block was used last."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = HostLedger(TOTAL, 1)
        self.ledger.told = self.told
        # What was told of the kept ones, and slots by name, least recently used first.
        self.known: set[bytes] = set()
        self.kept: dict[bytes, int] = {}
        self.requests: dict[int, list[int]] = {}
        self.pins: list[int] = []
        self.numbers = 0

    def told(self, stored: Sequence[bytes], gone: Sequence[bytes]) -> None:
        assert not self.known & set(stored) and self.known >= set(gone)
        self.known |= set(stored)
        self.known -= set(gone)

    def room(self) -> int:
        """What a request can get: all but what requests have and what is pinned."""
        return TOTAL - len({slot for slots in self.requests.values() for slot in slots} | set(self.pins))

    def goes(self, slots: int) -> None:
        """The model's kept blocks go for so many slots, as far as those are not free."""
        others = {slot for taken in self.requests.values() for slot in taken} | set(self.pins)
        free = TOTAL - len(others | set(self.kept.values()))
        for name in [name for name, slot in self.kept.items() if slot not in self.pins][
            : max(0, slots - free)
        ]:
            del self.kept[name]

    @rule(slots=st.integers(1, TOTAL))
    def swap_out(self, slots: int) -> None:
        fits = slots <= self.room()
        if fits:
            self.goes(slots)
        self.numbers += 1
        swapped = self.ledger.swap_out(str(self.numbers), slots, [b""] * slots)
        assert (swapped is not None) == fits
        if swapped is not None:
            self.requests[self.numbers] = swapped.slots

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.requests)))
        self.ledger.drop(str(number))
        del self.requests[number]

    @rule(name=NAMES)
    def evict(self, name: bytes) -> None:
        if name in self.kept:
            assert self.ledger.keep(name) is None
            self.kept[name] = self.kept.pop(name)
            return
        room = self.room()
        if room:
            self.goes(1)
        slot = self.ledger.keep(name)
        assert (slot is not None) == (room > 0)
        if slot is not None:
            self.kept[name] = slot

    @rule(names=st.lists(NAMES, min_size=1, max_size=4, unique=True))
    def load(self, names: list[bytes]) -> None:
        slots = self.ledger.find(names)
        assert slots == [self.kept[name] for name in names[: len(slots)]]
        assert len(slots) == len(names) or names[len(slots)] not in self.kept
        for slot in slots:
            self.ledger.pin(slot)
        self.pins += slots
        self.ledger.use(names[: len(slots)])
        for name in reversed(names[: len(slots)]):
            self.kept[name] = self.kept.pop(name)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def loaded(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(set(self.pins))))
        self.ledger.give_back([slot])
        self.pins.remove(slot)

    @rule(names=st.lists(NAMES, max_size=3))
    def forget(self, names: list[bytes]) -> None:
        self.ledger.forget(names)
        for name in names:
            self.kept.pop(name, None)

    @rule()
    def forget_all(self) -> None:
        self.ledger.forget_all()
        self.kept.clear()

    @invariant()
    def nothing_is_had_twice_and_all_are_told(self) -> None:
        own = [slot for slots in self.requests.values() for slot in slots]
        owners = Counter([*own, *self.kept.values()])
        assert max(owners.values(), default=0) <= 1
        assert all(0 <= slot < TOTAL for slot in owners)
        assert self.known == set(self.kept)
        assert self.ledger.kept == len(self.kept)
        pinned_alone = set(self.pins) - set(self.kept.values())
        assert self.ledger.used == len(own) + len(pinned_alone)
        assert self.ledger.used + self.ledger.kept <= TOTAL


TestOnePool = OnePool.TestCase


def test_a_name_may_be_forgotten_twice() -> None:
    ledger = HostLedger(TOTAL, 1)
    assert ledger.keep(b"a") is not None
    ledger.forget([b"a", b"a"])
    assert (ledger.kept, ledger.used) == (0, 0)
