"""Bookkeeping of host memory for KV, in slots of one block.

Slots belong to swapped-out requests and to imports that wait for the device. The remaining slots cache blocks
that the device's prefix cache has evicted. No bytes are stored here. Owned by the engine's thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice


@dataclass(frozen=True, slots=True)
class Swapped:
    """One request's KV in host memory: block i of the request is in slot `slots[i]` under `names[i]`."""

    tokens: int
    slots: list[int]
    # Content name of each block; see kv_names.
    names: list[bytes]


class HostLedger:
    """Slots 0..total-1 of one KV block each. A slot is free when its user count is 0.

    Cached blocks are indexed by name. Requests take precedence over them: when free slots run out, the least
    recently used unpinned cached blocks are dropped.
    """

    def __init__(self, total: int, block_bytes: int) -> None:
        self.total = total
        self.block_bytes = block_bytes
        # Requests swapped out, swapped in, and preempted with their KV lost because no slots were available.
        self.swapped_out = 0
        self.swapped_in = 0
        self.refused = 0
        # Blocks cached, and cached blocks dropped to make room.
        self.stored = 0
        self.dropped = 0
        # Called with the names that were added to the cache and those that were removed from it.
        self.on_change: Callable[[Sequence[bytes], Sequence[bytes]], None] = _ignore_change
        self._swapped: dict[str, Swapped] = {}
        # User count of each slot that is not free.
        self._users: dict[int, int] = {}
        # Free slots that have been used before; slots from _next_unused on never have.
        self._returned: list[int] = []
        self._next_unused = 0
        # Slot by block name, least recently used first.
        self._cached: OrderedDict[bytes, int] = OrderedDict()
        self._cached_slots: set[int] = set()
        # Cached slots with another user besides the cache.
        self._cached_pinned = 0

    @property
    def used(self) -> int:
        """Return the slots that belong to requests, or are pinned but no longer cached."""
        return self._allocated - len(self._cached)

    @property
    def cached(self) -> int:
        """Return the slots with cached blocks."""
        return len(self._cached)

    @property
    def _allocated(self) -> int:
        return self._next_unused - len(self._returned)

    # ---- slots

    def allocate(self, slots: int) -> list[int] | None:
        """Allocate slots, dropping cached blocks as needed. Return None and change nothing if there are too
        few."""
        free = self.total - self._allocated
        if slots > free + len(self._cached) - self._cached_pinned:
            return None
        if slots > free:
            self._drop(slots - free)
        allocated = [self._returned.pop() for _ in range(min(slots, len(self._returned)))]
        missing = slots - len(allocated)
        allocated.extend(range(self._next_unused, self._next_unused + missing))
        self._next_unused += missing
        for slot in allocated:
            self._users[slot] = 1
        return allocated

    def pin(self, slot: int) -> None:
        """Add a user to a slot that is not free."""
        self._users[slot] += 1
        self._cached_pinned += self._users[slot] == 2 and slot in self._cached_slots

    def release(self, slots: Sequence[int]) -> None:
        """Remove one user from each slot; slots without users become free."""
        for slot in slots:
            self._users[slot] -= 1
            self._cached_pinned -= self._users[slot] == 1 and slot in self._cached_slots
            if not self._users[slot]:
                del self._users[slot]
                self._returned.append(slot)

    # ---- cache of evicted blocks

    def cache(self, name: bytes) -> int | None:
        """Allocate a slot for a block that the device evicts. Return None if it is cached already or there is
        no room."""
        if name in self._cached:
            self._cached.move_to_end(name)
            return None
        allocated = self.allocate(1)
        if allocated is None:
            return None
        slot = self._cached[name] = allocated[0]
        self._cached_slots.add(slot)
        self.stored += 1
        self.on_change([name], [])
        return slot

    def find(self, names: Sequence[bytes]) -> list[int]:
        """Return the slots of the longest prefix of `names` that is cached."""
        slots: list[int] = []
        for name in names:
            slot = self._cached.get(name)
            if slot is None:
                break
            slots.append(slot)
        return slots

    def touch(self, names: Sequence[bytes]) -> None:
        """Mark the consecutive blocks of a prefix as used, so that later blocks are dropped before earlier
        ones."""
        for name in reversed(names):
            if name in self._cached:
                self._cached.move_to_end(name)

    def discard(self, names: Sequence[bytes]) -> None:
        """Remove blocks from the cache. Pinned slots stay allocated until released; unknown names are
        ignored."""
        removed = []
        for name in names:
            slot = self._cached.pop(name, None)
            if slot is None:
                continue
            removed.append(name)
            self._cached_pinned -= self._users[slot] > 1
            self._cached_slots.remove(slot)
            self.release([slot])
        if removed:
            self.on_change([], removed)

    def discard_all(self) -> None:
        """Remove all blocks from the cache."""
        self.discard(list(self._cached))

    def _drop(self, slots: int) -> None:
        """Drop as many unpinned cached blocks; the caller has checked that there are enough."""
        unpinned = (name for name, slot in self._cached.items() if self._users[slot] == 1)
        self.dropped += slots
        self.discard(list(islice(unpinned, slots)))

    # ---- requests

    def swap_out(self, request_id: str, tokens: int, names: list[bytes]) -> Swapped | None:
        """Allocate slots for a request's KV. Return None, and count a refusal, if there are too few."""
        slots = self.allocate(len(names))
        if slots is None:
            self.refused += 1
            return None
        self.swapped_out += 1
        swapped = Swapped(tokens, slots, names)
        self._swapped[request_id] = swapped
        return swapped

    def add_import(self, request_id: str, swapped: Swapped) -> None:
        """Register an imported request whose KV was received into already allocated slots."""
        self._swapped[request_id] = swapped

    def get(self, request_id: str) -> Swapped | None:
        """Return the request's KV in host memory, or None."""
        return self._swapped.get(request_id)

    def swap_in(self, request_id: str) -> Swapped | None:
        """Remove and return the request's KV; the caller releases the slots once they have been read."""
        swapped = self._swapped.pop(request_id, None)
        if swapped is not None:
            self.swapped_in += 1
        return swapped

    def drop(self, request_id: str) -> None:
        """Release the KV of a request that has ended; unknown requests are ignored."""
        swapped = self._swapped.pop(request_id, None)
        if swapped is not None:
            self.release(swapped.slots)


def _ignore_change(added: Sequence[bytes], removed: Sequence[bytes]) -> None:
    return
