"""The cache index: find the longest cached prefix of an arrival on all instances at once.

Soft state: a wrong entry costs time, but cannot cause a wrong answer. Pure: no I/O and no clock. Names are
64-bit integers (`tailrace.cache.names`), each of which identifies a block and all blocks before it.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np

# One tier of the cache index: which slots hold which names.
#
# A slot is an instance's bit position. A name maps to the set of its holders, an integer with their bits.
# Most names have one holder, and share one integer object per holder; larger sets are shared while they are
# few.

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


# Names per tier. Four million take about 450 MB.
NAMES_MAX: Final = 4_000_000
# Up to this many holders are decoded bit by bit; more are decoded with numpy.
_FEW: Final = 16


class Tier(enum.Enum):
    """A memory tier in which an instance keeps KV blocks. A block may be in both."""

    DEVICE = "device"
    HOST = "host"


class HeldBlocks(NamedTuple):
    """Leading blocks that an instance holds: on the device only, and on the device or in host memory."""

    device: int
    total: int


_NOTHING: Final[Mapping[str, HeldBlocks]] = MappingProxyType({})


class CacheIndex:
    """Block names by instance and tier."""

    def __init__(self, names_max: int = NAMES_MAX) -> None:
        """`names_max`: maximum names per tier; further ones are not recorded."""
        self._tiers = {tier: Holders(names_max) for tier in Tier}
        self._device = self._tiers[Tier.DEVICE]
        self._host = self._tiers[Tier.HOST]
        self._slots: dict[str, int] = {}
        self._instances: list[str] = []
        # A heap of free slots; reusing the smallest keeps the bit sets as short as possible.
        self._free: list[int] = []

    def __len__(self) -> int:
        """Return the number of names on any device."""
        return len(self._device)

    @property
    def refused(self) -> int:
        """Return how many names were not recorded because there were too many."""
        return sum(holders.refused for holders in self._tiers.values())

    def count(self, instance_id: str, tier: Tier = Tier.DEVICE) -> int:
        """Return the number of blocks that an instance holds."""
        slot = self._slots.get(instance_id)
        return self._tiers[tier].count(slot) if slot is not None else 0

    def names(self, instance_id: str, tier: Tier = Tier.DEVICE) -> set[int]:
        """Return the names of the blocks that an instance holds."""
        slot = self._slots.get(instance_id)
        return self._tiers[tier].of(slot) if slot is not None else set()

    def change(
        self, instance_id: str, stored: Iterable[int], removed: Iterable[int], tier: Tier = Tier.DEVICE
    ) -> None:
        """Record blocks that an instance stored and then removed; a name in both was removed last."""
        slot = self._slots.get(instance_id)
        if slot is None:
            slot = self._slot(instance_id)
        holders = self._tiers[tier]
        holders.add(slot, stored)
        holders.discard(slot, removed)

    def replace(self, instance_id: str, names: Iterable[int], tier: Tier = Tier.DEVICE) -> None:
        """Replace everything that an instance holds in a tier."""
        slot = self._slot(instance_id)
        self._tiers[tier].clear(slot)
        self._tiers[tier].add(slot, names)

    def forget(self, instance_id: str) -> None:
        """Remove an instance."""
        slot = self._slots.pop(instance_id, None)
        if slot is None:
            return
        for holders in self._tiers.values():
            holders.clear(slot)
        heappush(self._free, slot)

    def match(self, names: Sequence[int]) -> Mapping[str, HeldBlocks]:
        """Return how many leading blocks of `names` each instance holds, without instances that hold none."""
        device = self._device.holders(names)
        if not len(self._host):
            if not device:
                return _NOTHING
            held: dict[str, HeldBlocks] = {}
            for holders, blocks in _runs(device):
                held.update(dict.fromkeys(self._named(holders), HeldBlocks(blocks, blocks)))
            return held
        both = self._device.union(self._host, names)
        on_device = {name: blocks for holders, blocks in _runs(device) for name in self._named(holders)}
        return {
            name: HeldBlocks(on_device.get(name, 0), blocks)
            for holders, blocks in _runs(both)
            for name in self._named(holders)
        }

    def _slot(self, instance_id: str) -> int:
        slot = self._slots.get(instance_id)
        if slot is None:
            if self._free:
                slot = heappop(self._free)
                self._instances[slot] = instance_id
            else:
                slot = len(self._instances)
                self._instances.append(instance_id)
            self._slots[instance_id] = slot
        return slot

    def _named(self, holders: int) -> list[str]:
        instances = self._instances
        if holders.bit_count() > _FEW:
            raw = np.frombuffer(holders.to_bytes(-(-holders.bit_length() // 8), "little"), np.uint8)
            slots = np.flatnonzero(np.unpackbits(raw, bitorder="little"))
            return [instances[slot] for slot in slots.tolist()]
        named: list[str] = []
        while holders:
            least = holders & -holders
            named.append(instances[least.bit_length() - 1])
            holders ^= least
        return named


def _runs(sets: Sequence[int]) -> list[tuple[int, int]]:
    """Return pairs (holders, n) of the holders that are in exactly the first n sets, for n of at least 1."""
    if not sets:
        return []
    runs: list[tuple[int, int]] = []
    current = sets[0]
    for n, holders in enumerate(sets):
        remaining = current & holders
        if remaining != current:
            runs.append((current ^ remaining, n))
            current = remaining
            if not remaining:
                return runs
    runs.append((current, len(sets)))
    return runs
