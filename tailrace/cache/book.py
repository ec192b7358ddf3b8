"""Track the contents of an engine's prefix cache, and the changes that are not reported yet."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Final

from tailrace.cache.follow import Change
from tailrace.cache.index import Tier

# Bound on unreported changes. If there are more, all are dropped and their update number is skipped: the
# reader notices the gap and fetches a snapshot.
_PENDING_MAX: Final = 100_000


class CacheBook:
    """Written by the engine, read by the reporter; thread-safe.

    A change states whether a name is held at the time of the report, so applying it is idempotent, also after
    a snapshot that already includes it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[Tier, set[int]] = {tier: set() for tier in Tier}
        self._pending: dict[Tier, dict[int, bool]] = {tier: {} for tier in Tier}
        self._seq = 0

    def count(self, tier: Tier = Tier.DEVICE) -> int:
        """Return the number of blocks held."""
        return len(self._held[tier])

    def holds(self, name: int) -> bool:
        """Return whether a block is held in any tier."""
        return any(name in held for held in self._held.values())

    def change(self, stored: Iterable[int], removed: Iterable[int], tier: Tier = Tier.DEVICE) -> None:
        """Record blocks that the engine stored and then removed; a name in both was removed last."""
        with self._lock:
            held, pending = self._held[tier], self._pending[tier]
            held.update(stored)
            pending.update(dict.fromkeys(stored, True))
            held.difference_update(removed)
            pending.update(dict.fromkeys(removed, False))
            self._bound(pending)

    def clear(self, tier: Tier = Tier.DEVICE) -> None:
        """Record that the engine removed all blocks of a tier."""
        with self._lock:
            held, pending = self._held[tier], self._pending[tier]
            pending.update(dict.fromkeys(held, False))
            held.clear()
            self._bound(pending)

    def take(self) -> tuple[int, list[Change]]:
        """Return the number and the changes of the next update; without changes, the number of the last
        update."""
        with self._lock:
            changes: list[Change] = []
            for tier, pending in self._pending.items():
                if pending:
                    stored = [name for name, held in pending.items() if held]
                    changes.append(Change(tier, stored, [name for name, held in pending.items() if not held]))
                    pending.clear()
            if changes:
                self._seq += 1
            return self._seq, changes

    def snapshot(self) -> tuple[int, list[Change]]:
        """Return the number of the last update, and everything that is held."""
        with self._lock:
            return self._seq, [Change(tier, list(held)) for tier, held in self._held.items() if held]

    def _bound(self, pending: dict[int, bool]) -> None:
        if len(pending) > _PENDING_MAX:
            pending.clear()
            self._seq += 1
