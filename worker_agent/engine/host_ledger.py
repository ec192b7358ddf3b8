"""Who has which block of host memory: swapped requests, imports that wait for the device, and, in what they
leave, blocks that the device's prefix cache has evicted.

Plain bookkeeping, no bytes. Owned by the engine's thread.
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
    """Slots 0..total-1 of one KV block each. A slot is free when nobody owns or pins it.

    Evicted blocks are kept by name, in slots that nobody else wants: requests come first, and of the kept
    blocks the one goes first whose last use is longest ago. One that is pinned does not go.
    """

    def __init__(self, total: int, block_bytes: int) -> None:
        self.total = total
        self.block_bytes = block_bytes
        # Requests swapped out, in again, and preempted with their KV lost for want of room here.
        self.swapped_out = 0
        self.swapped_in = 0
        self.refused = 0
        # Evicted blocks that were kept, and of these those that had to go for others.
        self.stored = 0
        self.dropped = 0
        # Told which names are kept from now on, and which no longer.
        self.told: Callable[[Sequence[bytes], Sequence[bytes]], None] = _nobody
        self._swapped: dict[str, Swapped] = {}
        self._users: dict[int, int] = {}
        self._returned: list[int] = []
        self._untouched = 0
        # Least recently used first.
        self._kept: OrderedDict[bytes, int] = OrderedDict()
        self._kept_slots: set[int] = set()
        # Of these, those that somebody has pinned.
        self._kept_pinned = 0

    @property
    def used(self) -> int:
        """Slots that requests have, or that are pinned and no longer kept."""
        return self._taken - len(self._kept)

    @property
    def kept(self) -> int:
        """Slots with evicted blocks."""
        return len(self._kept)

    @property
    def _taken(self) -> int:
        return self._untouched - len(self._returned)

    # ---- slots

    def take(self, slots: int) -> list[int] | None:
        """So many slots, for which kept blocks go; None, and nothing changes, when there are not enough."""
        free = self.total - self._taken
        if slots > free + len(self._kept) - self._kept_pinned:
            return None
        if slots > free:
            self._drop(slots - free)
        taken = [self._returned.pop() for _ in range(min(slots, len(self._returned)))]
        missing = slots - len(taken)
        taken.extend(range(self._untouched, self._untouched + missing))
        self._untouched += missing
        for slot in taken:
            self._users[slot] = 1
        return taken

    def pin(self, slot: int) -> None:
        """One more user of a slot that somebody has."""
        self._users[slot] += 1
        self._kept_pinned += self._users[slot] == 2 and slot in self._kept_slots

    def give_back(self, slots: Sequence[int]) -> None:
        """One user less of each."""
        for slot in slots:
            self._users[slot] -= 1
            self._kept_pinned -= self._users[slot] == 1 and slot in self._kept_slots
            if not self._users[slot]:
                del self._users[slot]
                self._returned.append(slot)

    # ---- evicted blocks

    def keep(self, name: bytes) -> int | None:
        """A slot for a block that the device evicts; None: it is kept already, or there is no room."""
        if name in self._kept:
            self._kept.move_to_end(name)
            return None
        taken = self.take(1)
        if taken is None:
            return None
        slot = self._kept[name] = taken[0]
        self._kept_slots.add(slot)
        self.stored += 1
        self.told([name], [])
        return slot

    def find(self, names: Sequence[bytes]) -> list[int]:
        """Slots of the first of these names, up to the first that is not kept."""
        slots: list[int] = []
        for name in names:
            slot = self._kept.get(name)
            if slot is None:
                break
            slots.append(slot)
        return slots

    def use(self, names: Sequence[bytes]) -> None:
        """These follow each other, and are kept for longer from now on, the first for longest."""
        for name in reversed(names):
            if name in self._kept:
                self._kept.move_to_end(name)

    def forget(self, names: Sequence[bytes]) -> None:
        """Keep these no longer; who has pinned one has it until then. Those that are not kept are ignored."""
        gone = []
        for name in names:
            slot = self._kept.pop(name, None)
            if slot is None:
                continue
            gone.append(name)
            self._kept_pinned -= self._users[slot] > 1
            self._kept_slots.remove(slot)
            self.give_back([slot])
        if gone:
            self.told([], gone)

    def forget_all(self) -> None:
        """Keep nothing of what was kept."""
        self.forget(list(self._kept))

    def _drop(self, slots: int) -> None:
        """As many kept blocks that nobody has pinned, of which there are enough."""
        free = (name for name, slot in self._kept.items() if self._users[slot] == 1)
        self.dropped += slots
        self.forget(list(islice(free, slots)))

    # ---- requests

    def swap_out(self, request_id: str, tokens: int, names: list[bytes]) -> Swapped | None:
        """Room for a request's KV; None, and counted, when there is none."""
        slots = self.take(len(names))
        if slots is None:
            self.refused += 1
            return None
        self.swapped_out += 1
        swapped = Swapped(tokens, slots, names)
        self._swapped[request_id] = swapped
        return swapped

    def arrive(self, request_id: str, swapped: Swapped) -> None:
        """An import waits here; the slots are those it took."""
        self._swapped[request_id] = swapped

    def get(self, request_id: str) -> Swapped | None:
        """The request's KV, if it is here."""
        return self._swapped.get(request_id)

    def swap_in(self, request_id: str) -> Swapped | None:
        """The request goes to the device: the caller gives the slots back when they have been read."""
        swapped = self._swapped.pop(request_id, None)
        if swapped is not None:
            self.swapped_in += 1
        return swapped

    def drop(self, request_id: str) -> None:
        """The request is gone; ignored when it is not here."""
        swapped = self._swapped.pop(request_id, None)
        if swapped is not None:
            self.give_back(swapped.slots)


def _nobody(stored: Sequence[bytes], gone: Sequence[bytes]) -> None:
    return
