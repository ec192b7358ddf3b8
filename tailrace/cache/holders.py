"""One tier of the cache index: which slots hold which names.

A slot is an instance's bit position. A name maps to the set of its holders, an integer with their bits. Most
names have one holder, and share one integer object per holder; larger sets are shared while they are few.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Final

# Bound on distinct shared sets of several holders; beyond it, sharing starts over.
_SHARED_MAX: Final = 65_536
# A slot's list of names is compacted when it is longer than twice the number of names held, plus this.
_SLACK: Final = 1_024


class _Slot:
    """One slot. `names` has every name that it holds, and some that it no longer holds."""

    __slots__ = ("bit", "count", "names")

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.count = 0
        self.names = array("Q")


class Holders:
    """The holders of at most `names_max` names; further names are counted in `refused` but not recorded."""

    def __init__(self, names_max: int) -> None:
        self.refused = 0
        self._names_max = names_max
        self._by_name: dict[int, int] = {}
        self._shared: dict[int, int] = {}
        self._slots: dict[int, _Slot] = {}

    def __len__(self) -> int:
        """Return the number of names with a holder."""
        return len(self._by_name)

    def count(self, slot: int) -> int:
        """Return the number of names that a slot holds."""
        held = self._slots.get(slot)
        return held.count if held is not None else 0

    def add(self, slot: int, names: Iterable[int]) -> None:
        """Add names to a slot; names that it already holds are ignored."""
        held = self._slots.get(slot)
        if held is None:
            held = self._slots[slot] = _Slot(1 << slot)
        by_name, shared, bit, names_max = self._by_name, self._shared, held.bit, self._names_max
        get, append = by_name.get, held.names.append
        count = 0
        for name in names:
            before = get(name)
            if before is None:
                if len(by_name) >= names_max:
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
        """Remove names from a slot; names that it does not hold are ignored."""
        held = self._slots.get(slot)
        if held is None:
            return
        held.count -= self._remove(held.bit, names)
        if len(held.names) > 2 * held.count + _SLACK:
            get, bit = self._by_name.get, held.bit
            held.names = array("Q", {name for name in held.names if get(name, 0) & bit})

    def clear(self, slot: int) -> None:
        """Remove all names from a slot."""
        held = self._slots.pop(slot, None)
        if held is not None:
            self._remove(held.bit, held.names)

    def of(self, slot: int) -> set[int]:
        """Return the names that a slot holds."""
        held = self._slots.get(slot)
        if held is None:
            return set()
        get, bit = self._by_name.get, held.bit
        return {name for name in held.names if get(name, 0) & bit}

    def holders(self, names: Sequence[int]) -> list[int]:
        """Return the set of holders of each name, up to the first name without a holder."""
        get = self._by_name.get
        sets: list[int] = []
        for name in names:
            holders = get(name)
            if holders is None:
                break
            sets.append(holders)
        return sets

    def union(self, other: Holders, names: Sequence[int]) -> list[int]:
        """Return the set of holders of each name in either tier, up to the first name without a holder."""
        get_own, get_other = self._by_name.get, other._by_name.get
        sets: list[int] = []
        for name in names:
            holders = get_own(name, 0) | get_other(name, 0)
            if not holders:
                break
            sets.append(holders)
        return sets

    def _remove(self, bit: int, names: Iterable[int]) -> int:
        """Remove a slot's bit from names; return the number of names that had it."""
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
                remaining = before ^ bit
                by_name[name] = shared.setdefault(remaining, remaining)
            count += 1
        return count
