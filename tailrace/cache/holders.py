"""Which slots hold which names: one tier of the index.

A slot stands for an instance and is a bit; a name maps to the set of its holders, an integer with their bits.
Most names have one holder, and their sets are one shared object; so are larger sets while they are few.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Final

# Distinct sets of several holders that are kept to be shared. Beyond, sharing begins anew.
_SHARED_MAX: Final = 65_536
# A slot's list of names is written anew when it is longer than twice what the slot holds, and this.
_SLACK: Final = 1_024


class _Slot:
    """What one slot holds. `told` has every name that it holds, and some that it no longer does."""

    __slots__ = ("bit", "count", "told")

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.count = 0
        self.told = array("Q")


class Holders:
    """At most `most_names` names; what is beyond is not recorded, and counted."""

    def __init__(self, most_names: int) -> None:
        self.refused = 0
        self._most_names = most_names
        self._by_name: dict[int, int] = {}
        self._shared: dict[int, int] = {}
        self._slots: dict[int, _Slot] = {}

    def __len__(self) -> int:
        """Names with a holder."""
        return len(self._by_name)

    def count(self, slot: int) -> int:
        """Names that a slot holds."""
        held = self._slots.get(slot)
        return held.count if held is not None else 0

    def add(self, slot: int, names: Iterable[int]) -> None:
        """The slot holds these names. Those that it is known to hold change nothing."""
        held = self._slots.get(slot)
        if held is None:
            held = self._slots[slot] = _Slot(1 << slot)
        by_name, shared, bit, most = self._by_name, self._shared, held.bit, self._most_names
        get, append = by_name.get, held.told.append
        count = 0
        for name in names:
            before = get(name)
            if before is None:
                if len(by_name) >= most:
                    self.refused += 1
                    continue
                by_name[name] = bit
            elif before & bit:
                continue
            else:
                both = before | bit
                by_name[name] = shared.setdefault(both, both)
            append(name)
            count += 1
        held.count += count
        if len(shared) > _SHARED_MAX:
            shared.clear()

    def discard(self, slot: int, names: Iterable[int]) -> None:
        """The slot holds these names no longer. Those that it is not known to hold change nothing."""
        held = self._slots.get(slot)
        if held is None:
            return
        held.count -= self._take(held.bit, names)
        if len(held.told) > 2 * held.count + _SLACK:
            get, bit = self._by_name.get, held.bit
            held.told = array("Q", {name for name in held.told if get(name, 0) & bit})

    def clear(self, slot: int) -> None:
        """The slot holds nothing."""
        held = self._slots.pop(slot, None)
        if held is not None:
            self._take(held.bit, held.told)

    def of(self, slot: int) -> set[int]:
        """Names that a slot holds."""
        held = self._slots.get(slot)
        if held is None:
            return set()
        get, bit = self._by_name.get, held.bit
        return {name for name in held.told if get(name, 0) & bit}

    def sets(self, names: Sequence[int]) -> list[int]:
        """Holders of each name, up to the first that nobody holds."""
        get = self._by_name.get
        found: list[int] = []
        for name in names:
            holders = get(name)
            if holders is None:
                break
            found.append(holders)
        return found

    def either(self, other: Holders, names: Sequence[int]) -> list[int]:
        """Holders of each name here or there, up to the first that nobody holds."""
        here, there = self._by_name.get, other._by_name.get
        found: list[int] = []
        for name in names:
            holders = here(name, 0) | there(name, 0)
            if not holders:
                break
            found.append(holders)
        return found

    def _take(self, bit: int, names: Iterable[int]) -> int:
        """Take a slot's bit from names; from how many it was taken."""
        by_name, shared = self._by_name, self._shared
        get = by_name.get
        count = 0
        for name in names:
            before = get(name)
            if before is None or not before & bit:
                continue
            if before == bit:
                del by_name[name]
            else:
                rest = before ^ bit
                by_name[name] = shared.setdefault(rest, rest)
            count += 1
        return count
