"""Who has which block of host memory: swapped requests, and imports that wait for the device.

Plain bookkeeping, no bytes. Owned by the engine's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Swapped:
    """One request's KV in host memory: block i of the request is in slot `slots[i]` under `names[i]`."""

    tokens: int
    slots: list[int]
    # Content name of each block; see kv_names.
    names: list[bytes]


class HostLedger:
    """Slots 0..total-1 of one KV block each. A slot is free when nobody owns or pins it."""

    def __init__(self, total: int, block_bytes: int) -> None:
        self.total = total
        self.block_bytes = block_bytes
        # Requests swapped out, in again, and preempted with their KV lost for want of room here.
        self.swapped_out = 0
        self.swapped_in = 0
        self.refused = 0
        self._swapped: dict[str, Swapped] = {}
        self._users: dict[int, int] = {}
        self._returned: list[int] = []
        self._untouched = 0

    @property
    def used(self) -> int:
        """Slots that somebody has."""
        return self._untouched - len(self._returned)

    # ---- slots

    def take(self, slots: int) -> list[int] | None:
        """So many slots; None, and nothing changes, when there are not enough."""
        if slots > self.total - self.used:
            return None
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

    def give_back(self, slots: Sequence[int]) -> None:
        """One user less of each."""
        for slot in slots:
            self._users[slot] -= 1
            if not self._users[slot]:
                del self._users[slot]
                self._returned.append(slot)

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
