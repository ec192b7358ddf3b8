"""The prefix cache of one instance: named blocks, their reference counts, and their eviction order.

It follows vLLM's block pool (vllm/v1/core/block_pool.py): an unreferenced named block stays cached until its
memory is needed. Blocks are evicted in the order of their release, those of one request from the last to the
first. Names are those of units of several blocks if the workload names longer runs of tokens; a unit is
evicted as a whole. Unnamed blocks of requests, such as their outputs, are released and evicted in the same
order, but cannot be found.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from simulator.cluster import InstanceSpec
from simulator.request import SimRequest


def make_prefix_cache(spec: InstanceSpec, requests: Iterable[SimRequest]) -> PrefixCache | None:
    """Return an empty cache for an instance that is to serve these requests, or None if it has none.

    An instance has none if its spec disables prefix caching or no request names its blocks. Raise ValueError
    if units differ in length or are not a whole number of blocks.
    """
    units = {request.unit_tokens for request in requests if request.unit_names}
    if not units or not spec.prefix_caching:
        return None
    if len(units) > 1:
        raise ValueError(f"a workload names units of different lengths: {sorted(units)} tokens")
    (unit,) = units
    if unit < 1 or unit % spec.block_tokens:
        raise ValueError(
            f"{spec.instance_id}: units of {unit} tokens are not whole blocks of {spec.block_tokens}"
        )
    return PrefixCache(unit // spec.block_tokens)


class PrefixCache:
    """Units in use and cached, counted in KV blocks. `shared`: blocks saved by holding units jointly."""

    def __init__(self, unit_blocks: int) -> None:
        """Create an empty cache for units of `unit_blocks` blocks."""
        self.shared = 0
        self.changes = PresenceChanges()
        self._unit = unit_blocks
        # Holders of each unit in use.
        self._references: dict[int, int] = {}
        # Blocks of unreferenced entries in eviction order; unnamed entries have negative numbers.
        self._free: OrderedDict[int, int] = OrderedDict()
        self._free_blocks = 0
        self._last_unnamed = 0

    def __contains__(self, name: int) -> bool:
        return name in self._references or name in self._free

    def __len__(self) -> int:
        """Return the number of named units."""
        return len(self._references) + sum(name >= 0 for name in self._free)

    @property
    def unit_blocks(self) -> int:
        """Return the number of blocks of a named unit."""
        return self._unit

    def count_leading(self, names: Sequence[int], limit: int) -> int:
        """Return how many of the first `limit` names are cached, counted without a gap from the first."""
        count = 0
        for name in names[:limit]:
            if name not in self._references and name not in self._free:
                break
            count += 1
        return count

    def missing(self, names: Sequence[int]) -> list[int]:
        """Return the names that are not cached."""
        return [name for name in names if name not in self]

    def in_use(self, names: Sequence[int]) -> int:
        """Return the blocks of those units that a request holds."""
        return self._unit * sum(name in self._references for name in names)

    def acquire(self, names: Sequence[int]) -> None:
        """Add a holder to each of these units, which must be cached."""
        for name in names:
            holders = self._references.get(name, 0)
            if holders:
                self.shared += self._unit
            else:
                self._free_blocks -= self._free.pop(name)
            self._references[name] = holders + 1

    def add(self, name: int) -> bool:
        """Name a computed unit, held by the request that computed it.

        Return False if a unit in use has the name already: then this one stays unnamed.
        """
        if name in self._references:
            return False
        if name in self._free:
            # vLLM keeps two blocks with one name; here the older one loses it.
            self._free_blocks -= self._free.pop(name)
            self._free_unnamed(self._unit)
        self._references[name] = 1
        self.changes[name] = True
        return True

    def insert(self, names: Sequence[int]) -> None:
        """Add units that were loaded or transferred, without a holder."""
        for name in names:
            if name not in self:
                self._free[name] = self._unit
                self._free_blocks += self._unit
                self.changes[name] = True

    def release(self, names: Sequence[int], unnamed_blocks: int) -> None:
        """Remove a holder of these units and of `unnamed_blocks` blocks after them."""
        self._free_unnamed(unnamed_blocks)
        for name in reversed(names):
            holders = self._references[name] - 1
            if holders:
                self._references[name] = holders
                self.shared -= self._unit
            else:
                del self._references[name]
                self._free[name] = self._unit
                self._free_blocks += self._unit

    def slack(self, room_blocks: int) -> int:
        """Return by how many blocks the room may shrink before a named unit is evicted."""
        slack = room_blocks - self._free_blocks
        for name, blocks in self._free.items():
            if name >= 0:
                return slack
            slack += blocks
        return room_blocks

    def shrink(self, room_blocks: int) -> list[int]:
        """Evict until the unreferenced blocks fit into this room. Return the evicted units in order."""
        free = self._free
        evicted: list[int] = []
        while self._free_blocks > max(0, room_blocks):
            name = next(iter(free))
            if name < 0 and self._free_blocks - free[name] < room_blocks:
                over = self._free_blocks - room_blocks
                free[name] -= over
                self._free_blocks -= over
                break
            self._free_blocks -= free.pop(name)
            if name >= 0:
                self.changes[name] = False
                evicted.append(name)
        return evicted

    def _free_unnamed(self, blocks: int) -> None:
        if blocks > 0:
            self._last_unnamed -= 1
            self._free[self._last_unnamed] = blocks
            self._free_blocks += blocks


class PresenceChanges(dict[int, bool]):
    """Units whose presence in a memory changed since the scheduler's index last took them: True if added.

    A dict, since it is written for every unit that is stored or evicted.
    """

    def take(self) -> tuple[list[int], list[int]]:
        """Return the names added and the names removed since the last call, and clear them."""
        added = [name for name, present in self.items() if present]
        removed = [name for name, present in self.items() if not present]
        self.clear()
        return added, removed
