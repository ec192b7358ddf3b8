"""Keeps the index in step with what workers tell, in numbered updates that may be lost, late or told twice.

Pure: who calls it fetches what `wanted` names, and brings it with `snapshot`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from tailrace.cache.index import CacheIndex
from tailrace.cache.tiers import Tier

# Updates that are kept while a snapshot is on its way.
_KEPT_MAX: Final = 256


class Change(NamedTuple):
    """Names that one tier has gained and lost; what is in both was lost last."""

    tier: Tier
    stored: Sequence[int]
    removed: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class CacheState:
    """What is known of one instance's cache, to go on from elsewhere. `seq` None: an update is missing."""

    incarnation: str
    seq: int | None
    kept: tuple[tuple[int, tuple[Change, ...]], ...]
    held: tuple[Change, ...]


@dataclass(slots=True)
class _Followed:
    """One instance. `seq` None: an update is missing, and `kept` are those that came since."""

    incarnation: str
    seq: int | None = 0
    kept: deque[tuple[int, Sequence[Change]]] = field(default_factory=lambda: deque(maxlen=_KEPT_MAX))


class CacheFollower:
    """Until a snapshot comes, what was known of an instance stays: a little old is better than nothing."""

    def __init__(self, index: CacheIndex) -> None:
        self.index = index
        self._followed: dict[str, _Followed] = {}
        # Snapshots taken in.
        self.snapshots = 0

    @property
    def wanted(self) -> list[str]:
        """Instances of which an update is missing."""
        return [name for name, followed in self._followed.items() if followed.seq is None]

    def keep(self, incarnations: Mapping[str, str]) -> None:
        """These are the instances that there are, by id. A new incarnation begins from nothing."""
        for name in self._followed.keys() - incarnations.keys():
            del self._followed[name]
            self.index.forget(name)
        for name, incarnation in incarnations.items():
            followed = self._followed.get(name)
            if followed is None or followed.incarnation != incarnation:
                self._followed[name] = _Followed(incarnation)
                self.index.forget(name)

    def update(self, instance_id: str, incarnation: str, seq: int, changes: Sequence[Change]) -> None:
        """An instance has told the update of this number; no changes: the number of the last one that it has
        told. Of strangers nothing is taken."""
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
        """All that an instance holds; `seq`: the last update that it had told by then."""
        followed = self._of(instance_id, incarnation)
        if followed is None or (followed.seq is not None and seq < followed.seq):
            return
        self.snapshots += 1
        names = {change.tier: change.stored for change in held}
        for tier in Tier:
            self.index.replace(instance_id, names.get(tier, ()), tier)
        followed.seq = seq
        kept = list(followed.kept)
        followed.kept.clear()
        for number, changes in kept:
            self.update(instance_id, incarnation, number, changes)

    def state(self, instance_id: str) -> CacheState | None:
        """All that is known of an instance, in a form that `restore` takes; None: nothing."""
        followed = self._followed.get(instance_id)
        if followed is None:
            return None
        held = tuple(Change(tier, sorted(self.index.names(instance_id, tier))) for tier in Tier)
        kept = tuple(
            (seq, tuple(Change(c.tier, list(c.stored), list(c.removed)) for c in changes))
            for seq, changes in followed.kept
        )
        return CacheState(followed.incarnation, followed.seq, kept, held)

    def restore(self, instance_id: str, state: CacheState) -> None:
        """Go on from there."""
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
