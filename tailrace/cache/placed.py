"""Prefixes that instances are about to hold, because requests with them were just placed there.

Reports do not include them yet. With them, a cache-aware policy sends a burst of requests with one new prefix
to one instance. Pure: the caller passes the time, in seconds of its monotonic clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

from tailrace.cache.index import CacheIndex, HeldBlocks
from tailrace.cluster import CachedTokens

# Seconds for which a placement counts: as long as an unreported placement counts in the cluster model.
_KEPT_S: Final = 2.0
# Bound on remembered names; beyond it, the oldest placements are dropped.
_NAMES_MAX: Final = 200_000


def merge_placed(
    held: Mapping[str, HeldBlocks], placed: Mapping[str, HeldBlocks]
) -> Mapping[str, HeldBlocks]:
    """Return the leading blocks that each instance holds or is about to hold."""
    if not placed:
        return held
    merged = dict(held)
    for name, coming in placed.items():
        known = merged.get(name)
        if known is None or known.device < coming.device:
            merged[name] = HeldBlocks(coming.device, max(coming.total, 0 if known is None else known.total))
    return merged


def cached_tokens(
    held: Mapping[str, HeldBlocks], placed: Mapping[str, HeldBlocks], block_tokens: int, limit: int
) -> Mapping[str, CachedTokens]:
    """Return the same in tokens, at most `limit`, with the reported part of each."""
    tokens: dict[str, CachedTokens] = {}
    for name, blocks in merge_placed(held, placed).items():
        reported = held.get(name)
        tokens[name] = CachedTokens(
            min(blocks.device * block_tokens, limit),
            min(blocks.total * block_tokens, limit),
            0 if reported is None else min(reported.total * block_tokens, limit),
        )
    return tokens


class PlacedPrefixes:
    """An index of the prefixes that were placed within the last two seconds."""

    def __init__(self) -> None:
        self.index = CacheIndex()
        self._placed: deque[tuple[float, str, Sequence[int]]] = deque()
        # By instance and block: the number of placements that include it.
        self._counts: dict[str, dict[int, int]] = {}
        self._names = 0

    def place(self, instance_id: str, names: Sequence[int], now_s: float) -> None:
        """Record that a request with these blocks was placed on an instance."""
        self.forget(now_s)
        if not names:
            return
        self._placed.append((now_s, instance_id, names))
        self._names += len(names)
        counts = self._counts.setdefault(instance_id, {})
        for name in names:
            counts[name] = counts.get(name, 0) + 1
        self.index.change(instance_id, names, ())
        while self._names > _NAMES_MAX:
            self._drop()

    @property
    def placed(self) -> list[tuple[float, str, Sequence[int]]]:
        """Return (time, instance, names) of each placement that counts, oldest first."""
        return list(self._placed)

    def forget(self, now_s: float) -> None:
        """Drop placements that no longer count."""
        while self._placed and now_s - self._placed[0][0] > _KEPT_S:
            self._drop()

    def _drop(self) -> None:
        _, instance_id, names = self._placed.popleft()
        self._names -= len(names)
        counts = self._counts[instance_id]
        removed: list[int] = []
        for name in names:
            remaining = counts[name] - 1
            if remaining:
                counts[name] = remaining
            else:
                del counts[name]
                removed.append(name)
        self.index.change(instance_id, (), removed)
        if not counts:
            del self._counts[instance_id]
            self.index.forget(instance_id)
