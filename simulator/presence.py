"""Changes of which units a memory holds, collected until the scheduler's index takes them."""

from __future__ import annotations


class PresenceChanges(dict[int, bool]):
    """Names whose presence changed since the last `take`: True if added, False if removed.

    A dict, since it is written for every unit that is stored or evicted.
    """

    def take(self) -> tuple[list[int], list[int]]:
        """Return the names added and the names removed since the last call, and clear them."""
        added = [name for name, present in self.items() if present]
        removed = [name for name, present in self.items() if not present]
        self.clear()
        return added, removed
