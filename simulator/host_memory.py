"""The host memory of one instance: KV of requests that were swapped out, and blocks that the device evicted.

One pool with one count. Requests come first: what they need is taken from the blocks, those first that were
used longest ago. Blocks are kept in the units that they have names for (`simulator.prefix_cache`); one that
is found goes to the device, and stays here as well, so that it need not be copied out again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from simulator.presence import PresenceChanges


class HostMemory:
    """Counts in blocks of KV."""

    def __init__(self, total_blocks: int, unit_blocks: int = 0) -> None:
        """`total_blocks`: what fits. `unit_blocks`: blocks of a named unit; 0: none that were evicted are
        kept."""
        self.total_blocks = total_blocks
        # Of requests that are swapped out, or for which room is set aside.
        self.swapped_blocks = 0
        self._unit = unit_blocks
        # Units by name, the one that was used longest ago first.
        self._kept: OrderedDict[int, None] = OrderedDict()
        self.changes = PresenceChanges()

    def __contains__(self, name: int) -> bool:
        return name in self._kept

    @property
    def keeps(self) -> bool:
        """Whether anything that was evicted is ever kept."""
        return 0 < self._unit <= self.total_blocks

    @property
    def kept_blocks(self) -> int:
        """Of those that were evicted."""
        return len(self._kept) * self._unit

    def reserve(self, blocks: int) -> bool:
        """Set memory aside for a request, if other requests leave so much."""
        if self.swapped_blocks + blocks > self.total_blocks:
            return False
        self.swapped_blocks += blocks
        self._forget(self.total_blocks - self.swapped_blocks)
        return True

    def give_back(self, blocks: int) -> None:
        """A request needs so much no longer."""
        self.swapped_blocks -= blocks

    def keep(self, names: Iterable[int]) -> int:
        """The device evicts these units, in this order; blocks that are copied to here for that."""
        room = self.total_blocks - self.swapped_blocks
        if not self.keeps or self._unit > room:
            return 0
        copied = 0
        for name in names:
            if name in self._kept:
                self._kept.move_to_end(name)
                continue
            self._forget(room - self._unit)
            self._kept[name] = None
            self.changes[name] = True
            copied += self._unit
        return copied

    def use(self, names: Sequence[int]) -> None:
        """Units that are here are loaded; of one prefix the first is kept for longest."""
        for name in reversed(names):
            self._kept.move_to_end(name)

    def _forget(self, room: int) -> None:
        while self.kept_blocks > room:
            name, _ = self._kept.popitem(last=False)
            self.changes[name] = False
