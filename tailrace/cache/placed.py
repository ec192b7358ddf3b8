"""What instances are about to hold: prefixes of requests that were placed a moment ago.

No report tells of them yet. Of a burst with one new prefix all go where the first went, if that is what the
policy goes by. Pure: the caller brings the time, in seconds of its monotonic clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

from tailrace.cache.index import CacheIndex, HeldBlocks
from tailrace.cluster import CachedTokens

# For so long a placement counts unless it is told of before: as long as one counts that no report shows.
_KEPT_S: Final = 2.0
# Names of placements that are remembered at a time; beyond, the oldest are forgotten.
_NAMES_MAX: Final = 200_000


def with_placed(held: Mapping[str, HeldBlocks], placed: Mapping[str, HeldBlocks]) -> Mapping[str, HeldBlocks]:
    """Leading blocks that each instance holds, or is about to."""
    if not placed:
        return held
    found = dict(held)
    for name, coming in placed.items():
        there = found.get(name)
        if there is None or there.device < coming.device:
            found[name] = HeldBlocks(coming.device, max(coming.total, 0 if there is None else there.total))
    return found


def cached_tokens(
    held: Mapping[str, HeldBlocks], placed: Mapping[str, HeldBlocks], block_tokens: int, most: int
) -> Mapping[str, CachedTokens]:
    """The same in tokens, `most` at most, each with what of it is told of."""
    found: dict[str, CachedTokens] = {}
    for name, blocks in with_placed(held, placed).items():
        told = held.get(name)
        found[name] = CachedTokens(
            min(blocks.device * block_tokens, most),
            min(blocks.total * block_tokens, most),
            0 if told is None else min(told.total * block_tokens, most),
        )
    return found


class PlacedPrefixes:
    """An index of its own, with what is placed in the last two seconds."""

    def __init__(self) -> None:
        self.index = CacheIndex()
        self._placed: deque[tuple[float, str, Sequence[int]]] = deque()
        # How many of the placements name a block of an instance.
        self._counts: dict[str, dict[int, int]] = {}
        self._names = 0

    def place(self, instance_id: str, names: Sequence[int], now_s: float) -> None:
        """A request with these blocks was placed there."""
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
        """(when, instance, names) of each placement that counts, oldest first, as `place` takes them."""
        return list(self._placed)

    def forget(self, now_s: float) -> None:
        """Those that are too long ago."""
        while self._placed and now_s - self._placed[0][0] > _KEPT_S:
            self._drop()

    def _drop(self) -> None:
        _, instance_id, names = self._placed.popleft()
        self._names -= len(names)
        counts = self._counts[instance_id]
        gone: list[int] = []
        for name in names:
            left = counts[name] - 1
            if left:
                counts[name] = left
            else:
                del counts[name]
                gone.append(name)
        self.index.change(instance_id, (), gone)
        if not counts:
            del self._counts[instance_id]
            self.index.forget(instance_id)
