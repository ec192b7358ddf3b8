"""The ledger stays within its total, prefers requests to cached blocks, and never shares a slot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from worker_agent.engine.host_ledger import HostLedger

TOTAL = 8
NAMES = st.sampled_from([bytes([n]) for n in range(12)])


class LedgerMachine(RuleBasedStateMachine):
    """Compare the ledger with a model of all owners and of the least recently used order."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = HostLedger(TOTAL, 1)
        self.ledger.on_change = self.on_change
        # The cached names as reported, and cached slots by name, least recently used first.
        self.reported: set[bytes] = set()
        self.cached: dict[bytes, int] = {}
        self.requests: dict[int, list[int]] = {}
        self.pins: list[int] = []
        self.numbers = 0

    def on_change(self, added: Sequence[bytes], removed: Sequence[bytes]) -> None:
        assert not self.reported & set(added) and self.reported >= set(removed)
        self.reported |= set(added)
        self.reported -= set(removed)

    def room(self) -> int:
        """Return the number of slots that a request can get: those neither owned by a request nor pinned."""
        return TOTAL - len({slot for slots in self.requests.values() for slot in slots} | set(self.pins))

    def make_room(self, slots: int) -> None:
        """Drop cached blocks from the model until this many slots are free."""
        others = {slot for request_slots in self.requests.values() for slot in request_slots} | set(self.pins)
        free = TOTAL - len(others | set(self.cached.values()))
        for name in [name for name, slot in self.cached.items() if slot not in self.pins][
            : max(0, slots - free)
        ]:
            del self.cached[name]

    @rule(slots=st.integers(1, TOTAL))
    def swap_out(self, slots: int) -> None:
        fits = slots <= self.room()
        if fits:
            self.make_room(slots)
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
        if name in self.cached:
            assert self.ledger.cache(name) is None
            self.cached[name] = self.cached.pop(name)
            return
        room = self.room()
        if room:
            self.make_room(1)
        slot = self.ledger.cache(name)
        assert (slot is not None) == (room > 0)
        if slot is not None:
            self.cached[name] = slot

    @rule(names=st.lists(NAMES, min_size=1, max_size=4, unique=True))
    def load(self, names: list[bytes]) -> None:
        slots = self.ledger.find(names)
        assert slots == [self.cached[name] for name in names[: len(slots)]]
        assert len(slots) == len(names) or names[len(slots)] not in self.cached
        for slot in slots:
            self.ledger.pin(slot)
        self.pins += slots
        self.ledger.touch(names[: len(slots)])
        for name in reversed(names[: len(slots)]):
            self.cached[name] = self.cached.pop(name)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def loaded(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(set(self.pins))))
        self.ledger.release([slot])
        self.pins.remove(slot)

    @rule(names=st.lists(NAMES, max_size=3))
    def discard(self, names: list[bytes]) -> None:
        self.ledger.discard(names)
        for name in names:
            self.cached.pop(name, None)

    @rule()
    def discard_all(self) -> None:
        self.ledger.discard_all()
        self.cached.clear()

    @invariant()
    def slots_have_one_owner_and_changes_are_reported(self) -> None:
        own = [slot for slots in self.requests.values() for slot in slots]
        owners = Counter([*own, *self.cached.values()])
        assert max(owners.values(), default=0) <= 1
        assert all(0 <= slot < TOTAL for slot in owners)
        assert self.reported == set(self.cached)
        assert self.ledger.cached == len(self.cached)
        pinned_alone = set(self.pins) - set(self.cached.values())
        assert self.ledger.used == len(own) + len(pinned_alone)
        assert self.ledger.used + self.ledger.cached <= TOTAL


TestLedger = LedgerMachine.TestCase


def test_name_can_be_discarded_twice() -> None:
    ledger = HostLedger(TOTAL, 1)
    assert ledger.cache(b"a") is not None
    ledger.discard([b"a", b"a"])
    assert (ledger.cached, ledger.used) == (0, 0)
