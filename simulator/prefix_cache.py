"""The prefix cache of one instance: named blocks, who holds them, and the order in which they are evicted.

As vLLM's block pool has it (vllm/v1/core/block_pool.py): a named block that nobody holds stays until its room
is needed, and those go first that were let go first, of one request the last block first. Names come in units
of several blocks where the workload names longer runs of tokens; a unit is evicted as a whole. What requests
hold without a name, such as their outputs, is kept and evicted in the same order, and never found.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from simulator.cluster import InstanceSpec
from simulator.presence import PresenceChanges
from simulator.request import SimRequest


def prefix_cache(spec: InstanceSpec, requests: Iterable[SimRequest]) -> PrefixCache | None:
    """An empty cache for an instance that is to serve these; None: none of them names its blocks, or the
    instance keeps none. Raises ValueError for units of different lengths, or that are no whole number of
    blocks."""
    units = {request.unit_tokens for request in requests if request.unit_names}
    if not units or not spec.prefix_caching:
        return None
    if len(units) > 1:
        raise ValueError(f"a workload names units of different lengths: {sorted(units)} tokens")
    (unit,) = units
    if unit < 1 or unit % spec.block_tokens:
        raise ValueError(
            f"{spec.instance_id}: units of {unit} tokens are no whole blocks of {spec.block_tokens}"
        )
    return PrefixCache(unit // spec.block_tokens)


class PrefixCache:
    """Counts in blocks of KV. `shared` blocks are held by several: each holder counts them as its own."""

    def __init__(self, unit_blocks: int) -> None:
        """`unit_blocks`: blocks of a named unit."""
        self.shared = 0
        self._unit = unit_blocks
        self._held: dict[int, int] = {}
        # Nobody's, first to go first; those without a name have negative numbers.
        self._free: OrderedDict[int, int] = OrderedDict()
        self._free_blocks = 0
        self._nameless = 0
        self.changes = PresenceChanges()

    def __contains__(self, name: int) -> bool:
        return name in self._held or name in self._free

    def __len__(self) -> int:
        """Names that are here."""
        return len(self._held) + sum(name >= 0 for name in self._free)

    @property
    def unit_blocks(self) -> int:
        """Blocks of a named unit."""
        return self._unit

    def leading(self, names: Sequence[int], most: int) -> int:
        """How many of the first `most` names are here in a row from the first on."""
        count = 0
        for name in names[:most]:
            if name not in self._held and name not in self._free:
                break
            count += 1
        return count

    def lacking(self, names: Sequence[int]) -> list[int]:
        """Those of these names that are not here."""
        return [name for name in names if name not in self]

    def in_use(self, names: Sequence[int]) -> int:
        """Blocks of these that somebody holds."""
        return self._unit * sum(name in self._held for name in names)

    def hold(self, names: Sequence[int]) -> None:
        """One more holder of these, which are all here."""
        for name in names:
            holders = self._held.get(name, 0)
            if holders:
                self.shared += self._unit
            else:
                self._free_blocks -= self._free.pop(name)
            self._held[name] = holders + 1

    def add(self, name: int) -> bool:
        """A unit has been computed, and its holder holds it by name; False: there is one already, and this
        one stays without a name."""
        if name in self._held:
            return False
        if name in self._free:
            # Of two blocks with one name vLLM keeps both; here the older loses it.
            self._free_blocks -= self._free.pop(name)
            self._let_nameless(self._unit)
        self._held[name] = 1
        self.changes[name] = True
        return True

    def bring(self, names: Sequence[int]) -> None:
        """Units have come from elsewhere: they can be found, and nobody holds them."""
        for name in names:
            if name not in self:
                self._free[name] = self._unit
                self._free_blocks += self._unit
                self.changes[name] = True

    def let_go(self, names: Sequence[int], nameless_blocks: int) -> None:
        """A holder of these, and of so many blocks without a name after them, is gone."""
        self._let_nameless(nameless_blocks)
        for name in reversed(names):
            holders = self._held[name] - 1
            if holders:
                self._held[name] = holders
                self.shared -= self._unit
            else:
                del self._held[name]
                self._free[name] = self._unit
                self._free_blocks += self._unit

    def slack(self, room_blocks: int) -> int:
        """Blocks by which the room may get smaller before a named unit is evicted."""
        slack = room_blocks - self._free_blocks
        for name, blocks in self._free.items():
            if name >= 0:
                return slack
            slack += blocks
        return room_blocks

    def shrink(self, room_blocks: int) -> list[int]:
        """Evict until what nobody holds fits into this room; the units that went, in order."""
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

    def _let_nameless(self, blocks: int) -> None:
        if blocks > 0:
            self._nameless -= 1
            self._free[self._nameless] = blocks
            self._free_blocks += blocks
