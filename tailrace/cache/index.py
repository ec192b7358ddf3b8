"""Where each prefix is: the longest match of an arrival against all instances at once.

Soft state: a wrong entry costs time, never an answer. Pure: no I/O and no clock. Names are 64-bit integers
(`tailrace.cache.names`), each of which stands for a block and all blocks before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np

from tailrace.cache.holders import Holders
from tailrace.cache.tiers import Tier

# Names of one tier. Four million take some 450 MB.
MOST_NAMES: Final = 4_000_000
# Holders that are told one by one; more are told together.
_FEW: Final = 16


class HeldBlocks(NamedTuple):
    """Leading blocks that an instance holds: on the device alone, and on the device or in host memory."""

    device: int
    total: int


_NOTHING: Final[Mapping[str, HeldBlocks]] = MappingProxyType({})


class CacheIndex:
    """Names by instance and tier."""

    def __init__(self, most_names: int = MOST_NAMES) -> None:
        """`most_names`: of each tier; what is beyond is not recorded."""
        self._tiers = {tier: Holders(most_names) for tier in Tier}
        self._device = self._tiers[Tier.DEVICE]
        self._host = self._tiers[Tier.HOST]
        self._slots: dict[str, int] = {}
        self._instances: list[str] = []
        # Slots of instances that have gone, least first: bit sets stay as short as there are instances.
        self._free: list[int] = []

    def __len__(self) -> int:
        """Names on any device."""
        return len(self._device)

    @property
    def refused(self) -> int:
        """Names that were not recorded because there were too many."""
        return sum(holders.refused for holders in self._tiers.values())

    def count(self, instance_id: str, tier: Tier = Tier.DEVICE) -> int:
        """Blocks that an instance holds."""
        slot = self._slots.get(instance_id)
        return self._tiers[tier].count(slot) if slot is not None else 0

    def names(self, instance_id: str, tier: Tier = Tier.DEVICE) -> set[int]:
        """The names themselves."""
        slot = self._slots.get(instance_id)
        return self._tiers[tier].of(slot) if slot is not None else set()

    def change(
        self, instance_id: str, stored: Iterable[int], removed: Iterable[int], tier: Tier = Tier.DEVICE
    ) -> None:
        """An instance has gained and lost these blocks. What is in both was lost last."""
        slot = self._slots.get(instance_id)
        if slot is None:
            slot = self._slot(instance_id)
        holders = self._tiers[tier]
        holders.add(slot, stored)
        holders.discard(slot, removed)

    def replace(self, instance_id: str, names: Iterable[int], tier: Tier = Tier.DEVICE) -> None:
        """An instance holds these blocks and no others."""
        slot = self._slot(instance_id)
        self._tiers[tier].clear(slot)
        self._tiers[tier].add(slot, names)

    def forget(self, instance_id: str) -> None:
        """An instance has left, or begins from nothing."""
        slot = self._slots.pop(instance_id, None)
        if slot is None:
            return
        for holders in self._tiers.values():
            holders.clear(slot)
        heappush(self._free, slot)

    def match(self, names: Sequence[int]) -> Mapping[str, HeldBlocks]:
        """Leading blocks of these that each instance holds; those that hold none are not in it."""
        device = self._device.sets(names)
        if not len(self._host):
            if not device:
                return _NOTHING
            found: dict[str, HeldBlocks] = {}
            for holders, blocks in _runs(device):
                found.update(dict.fromkeys(self._named(holders), HeldBlocks(blocks, blocks)))
            return found
        both = self._device.either(self._host, names)
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
    """(holders, n): those that are in exactly the first n sets; n at least 1."""
    if not sets:
        return []
    ended: list[tuple[int, int]] = []
    going = sets[0]
    for n, holders in enumerate(sets):
        on = going & holders
        if on != going:
            ended.append((going ^ on, n))
            going = on
            if not on:
                return ended
    ended.append((going, len(sets)))
    return ended
