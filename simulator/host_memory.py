"""The host memory of one instance: KV of swapped-out requests, and units evicted from the device.

Both share one pool. Requests take precedence: their memory is taken from the cached units, least recently
used first. Units have the names of `simulator.prefix_cache`. One that is loaded to the device stays here as
well, so that it need not be copied out again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from simulator.prefix_cache import PresenceChanges


class HostMemory:
    """The memory's use, in KV blocks."""

    def __init__(self, total_blocks: int, unit_blocks: int = 0) -> None:
        """Create an empty memory. `unit_blocks`: blocks of a named unit; 0 disables caching."""
        self.total_blocks = total_blocks
        # Blocks of swapped-out requests, and blocks reserved for them.
        self.swapped_blocks = 0
        self.changes = PresenceChanges()
        self._unit = unit_blocks
        # Units by name, least recently used first.
        self._cached: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, name: int) -> bool:
        return name in self._cached

    @property
    def caches(self) -> bool:
        """Return whether units evicted from the device are cached."""
        return 0 < self._unit <= self.total_blocks

    @property
    def cached_blocks(self) -> int:
        """Return the number of blocks of cached units."""
        return len(self._cached) * self._unit

    def reserve(self, blocks: int) -> bool:
        """Reserve memory for a request. Return whether other requests leave enough."""
        if self.swapped_blocks + blocks > self.total_blocks:
            return False
        self.swapped_blocks += blocks
        self._shrink(self.total_blocks - self.swapped_blocks)
        return True

    def release(self, blocks: int) -> None:
        """Return memory reserved for a request."""
        self.swapped_blocks -= blocks

    def store(self, names: Iterable[int]) -> int:
        """Cache units evicted from the device, in this order. Return the blocks copied for that."""
        room = self.total_blocks - self.swapped_blocks
        if not self.caches or self._unit > room:
            return 0
        copied = 0
        for name in names:
            if name in self._cached:
                self._cached.move_to_end(name)
                continue
            self._shrink(room - self._unit)
            self._cached[name] = None
            self.changes[name] = True
            copied += self._unit
        return copied

    def touch(self, names: Sequence[int]) -> None:
        """Mark cached units of a prefix as used, the first as most recently."""
        for name in reversed(names):
            self._cached.move_to_end(name)

    def _shrink(self, room: int) -> None:
        while self.cached_blocks > room:
            name, _ = self._cached.popitem(last=False)
            self.changes[name] = False
