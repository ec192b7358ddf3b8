"""What an engine's prefix cache holds, and what of it is not told yet."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Final

from tailrace.cache.follow import Change
from tailrace.cache.tiers import Tier

# Changes that wait to be told. When there are more, they are not: who misses the number asks for all.
_UNTOLD_MAX: Final = 100_000


class CacheBook:
    """Written by the engine, read by who reports: safe to use from any thread.

    A change says whether a name is held at the time of telling, so that it may be taken in twice, or after a
    snapshot that has it already.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[Tier, set[int]] = {tier: set() for tier in Tier}
        self._untold: dict[Tier, dict[int, bool]] = {tier: {} for tier in Tier}
        self._seq = 0

    def count(self, tier: Tier = Tier.DEVICE) -> int:
        """Blocks that are held."""
        return len(self._held[tier])

    def holds(self, name: int) -> bool:
        """Whether it is held, in whichever tier."""
        return any(name in held for held in self._held.values())

    def change(self, stored: Iterable[int], removed: Iterable[int], tier: Tier = Tier.DEVICE) -> None:
        """The engine has gained and lost these; what is in both was lost last."""
        with self._lock:
            held, untold = self._held[tier], self._untold[tier]
            held.update(stored)
            untold.update(dict.fromkeys(stored, True))
            held.difference_update(removed)
            untold.update(dict.fromkeys(removed, False))
            self._bound(untold)

    def clear(self, tier: Tier = Tier.DEVICE) -> None:
        """The engine has lost all that this tier held."""
        with self._lock:
            held, untold = self._held[tier], self._untold[tier]
            untold.update(dict.fromkeys(held, False))
            held.clear()
            self._bound(untold)

    def take(self) -> tuple[int, list[Change]]:
        """What is to be told next, with its number; no changes: the number of the last one that was told."""
        with self._lock:
            changes: list[Change] = []
            for tier, untold in self._untold.items():
                if untold:
                    stored = [name for name, held in untold.items() if held]
                    changes.append(Change(tier, stored, [name for name, held in untold.items() if not held]))
                    untold.clear()
            if changes:
                self._seq += 1
            return self._seq, changes

    def snapshot(self) -> tuple[int, list[Change]]:
        """All that is held, and the number of the last update that was told."""
        with self._lock:
            return self._seq, [Change(tier, list(held)) for tier, held in self._held.items() if held]

    def _bound(self, untold: dict[int, bool]) -> None:
        if len(untold) > _UNTOLD_MAX:
            untold.clear()
            self._seq += 1
