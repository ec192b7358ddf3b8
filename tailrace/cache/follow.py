"""Maintain the cache index from the workers' numbered updates, which may be lost, late or duplicated.

Pure: the caller fetches snapshots of the instances in `wanted` and passes them to `snapshot`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from tailrace.cache.index import CacheIndex, Tier

# Updates kept while a snapshot is being fetched.
_KEPT_MAX: Final = 256


class Change(NamedTuple):
    """Names that one tier stored and removed; a name in both was removed last."""

    tier: Tier
    stored: Sequence[int]
    removed: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class CacheState:
    """The known state of one instance's cache, for recordings. `seq` None: an update is missing."""

    incarnation: str
    seq: int | None
    kept: tuple[tuple[int, tuple[Change, ...]], ...]
    held: tuple[Change, ...]


@dataclass(slots=True)
class _Followed:
    """One instance. `seq` None: an update is missing; `kept` are the updates received since."""

    incarnation: str
    seq: int | None = 0
    kept: deque[tuple[int, Sequence[Change]]] = field(default_factory=lambda: deque(maxlen=_KEPT_MAX))


class CacheFollower:
    """Apply updates and snapshots to the index.

    If an update is missing, the instance's known state is used until a snapshot arrives: slightly outdated
    knowledge is better than none.
    """

    def __init__(self, index: CacheIndex) -> None:
        self.index = index
        self._followed: dict[str, _Followed] = {}
        # Number of snapshots applied.
        self.snapshots = 0

    @property
    def incomplete(self) -> list[str]:
        """Return the instances that need a snapshot because an update is missing."""
        return [name for name, followed in self._followed.items() if followed.seq is None]

    def keep(self, incarnations: Mapping[str, str]) -> None:
        """Set the current instances: incarnations by id. Others are dropped; a new incarnation starts
        empty."""
        for name in self._followed.keys() - incarnations.keys():
            del self._followed[name]
            self.index.forget(name)
        for name, incarnation in incarnations.items():
            followed = self._followed.get(name)
            if followed is None or followed.incarnation != incarnation:
                self._followed[name] = _Followed(incarnation)
                self.index.forget(name)

    def update(self, instance_id: str, incarnation: str, seq: int, changes: Sequence[Change]) -> None:
        """Apply an instance's update; without changes, `seq` is the number of its last update.

        Unknown instances and incarnations are ignored.
        """
        followed = self._of(instance_id, incarnation)
        if followed is None:
            return
        if followed.seq is None:
            if changes:
                followed.kept.append((seq, changes))
            return
        if seq <= followed.seq:
            return
        if changes and seq == followed.seq + 1:
            followed.seq = seq
            self._apply(instance_id, changes)
            return
        followed.seq = None
        followed.kept.clear()
        if changes:
            followed.kept.append((seq, changes))

    def snapshot(self, instance_id: str, incarnation: str, seq: int, held: Iterable[Change]) -> None:
        """Apply a snapshot of everything that an instance holds; `seq`: the last update that it includes."""
        followed = self._of(instance_id, incarnation)
        if followed is None or (followed.seq is not None and seq < followed.seq):
            return
        self.snapshots += 1
        names = {change.tier: change.stored for change in held}
        for tier in Tier:
            self.index.replace(instance_id, names.get(tier, ()), tier)
        followed.seq = seq
        updates = list(followed.kept)
        followed.kept.clear()
        for number, changes in updates:
            self.update(instance_id, incarnation, number, changes)

    def state(self, instance_id: str) -> CacheState | None:
        """Return what is known about an instance, for `restore`; None: nothing."""
        followed = self._followed.get(instance_id)
        if followed is None:
            return None
        held = tuple(Change(tier, sorted(self.index.names(instance_id, tier))) for tier in Tier)
        updates = tuple(
            (seq, tuple(Change(c.tier, list(c.stored), list(c.removed)) for c in changes))
            for seq, changes in followed.kept
        )
        return CacheState(followed.incarnation, followed.seq, updates, held)

    def restore(self, instance_id: str, state: CacheState) -> None:
        """Continue from a recorded state."""
        followed = self._followed[instance_id] = _Followed(state.incarnation, state.seq)
        followed.kept.extend(state.kept)
        for change in state.held:
            self.index.replace(instance_id, change.stored, change.tier)

    def _of(self, instance_id: str, incarnation: str) -> _Followed | None:
        followed = self._followed.get(instance_id)
        return followed if followed is not None and followed.incarnation == incarnation else None

    def _apply(self, instance_id: str, changes: Sequence[Change]) -> None:
        for change in changes:
            self.index.change(instance_id, change.stored, change.removed, change.tier)
