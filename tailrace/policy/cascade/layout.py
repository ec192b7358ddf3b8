"""The layout of stages: find the stage for a length, and repair the stages when instances join or leave."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tailrace.cluster import ClusterView, InstanceState, InstanceView, Stage
from tailrace.policy.columns import SeenInstances

# Positions of instances in a view.
Positions = NDArray[np.intp]

# Stages whose members are remembered: those of a few layouts.
_STAGES_MAX: Final = 64


def earliest_stage(stages: Sequence[Stage], length: int) -> int:
    """Return the number of the earliest stage whose range covers a length (section 3.2); else the last."""
    for at, stage in enumerate(stages):
        if length < stage.hi:
            return at
    return len(stages) - 1


def stage_of(stages: Sequence[Stage], instance_id: str) -> int | None:
    """Return the number of the stage that an instance serves; None: it is in no stage."""
    return next((at for at, stage in enumerate(stages) if instance_id in stage.instance_ids), None)


def active_in(view: ClusterView, stage: Stage) -> list[InstanceView]:
    """Return the active instances of a stage, in its order."""
    active = InstanceState.ACTIVE
    members = (view.instances.get(name) for name in stage.instance_ids)
    return [i for i in members if i is not None and i.state is active]


class StageMembers:
    """The positions of stages' instances among the instances seen last, in each stage's order."""

    def __init__(self) -> None:
        self._stages: list[tuple[Stage, Positions]] = []
        # Positions by instance id for which these were found.
        self._at: dict[str, int] = {}

    def of(self, stage: Stage, seen: SeenInstances) -> Positions:
        """Return the members of a stage that are known."""
        if self._at is not seen.at or len(self._stages) >= _STAGES_MAX:
            self._at, self._stages = seen.at, []
        # By identity: to compare stages is to compare the names of all their instances.
        for known, members in self._stages:
            if known is stage:
                return members
        members = np.array([seen.at[name] for name in stage.instance_ids if name in seen.at], dtype=np.intp)
        self._stages.append((stage, members))
        return members


def nearest_first(count: int, at: int) -> list[int]:
    """Return the stage numbers by distance from `at`; of equals, the stage of longer lengths first, which can
    also serve shorter ones."""
    return sorted(range(count), key=lambda other: (abs(other - at), -other))


def tiles(stages: Sequence[Stage], max_length: int) -> bool:
    """Return whether the stages tile [0, max_length) without empty ranges, each with its own instances."""
    if not stages or stages[0].lo != 0 or stages[-1].hi != max_length:
        return False
    names = [name for stage in stages for name in stage.instance_ids]
    return (
        all(stage.lo < stage.hi and stage.instance_ids for stage in stages)
        and all(a.hi == b.lo for a, b in pairwise(stages))
        and len(set(names)) == len(names)
    )


def repaired(
    stages: Sequence[Stage], instance_ids: Collection[str], demand: Mapping[str, int]
) -> tuple[Stage, ...]:
    """Return the stages with exactly these instances.

    Missing instances are removed; a stage without instances gives its range to the stage before it (the first
    one, to the stage after it). A new instance joins a stage that has lost all of its own, else the one with
    the highest demand per instance (`demand`: KV tokens used and queued, by instance). Without instances
    there are no stages.
    """
    left = [
        replace(stage, instance_ids=tuple(i for i in stage.instance_ids if i in instance_ids))
        for stage in stages
    ]
    known = {name for stage in left for name in stage.instance_ids}
    new = sorted(set(instance_ids) - known)
    for name in new:
        if not left:
            break
        at = max(range(len(left)), key=lambda n: (_demand_each(left[n], demand), -n))
        left[at] = replace(left[at], instance_ids=(*left[at].instance_ids, name))
    kept: list[Stage] = []
    for stage in left:
        if stage.instance_ids:
            lo = kept[-1].hi if kept else 0
            kept.append(replace(stage, lo=lo))
        elif kept:
            kept[-1] = replace(kept[-1], hi=stage.hi)
    return tuple(kept)


def _demand_each(stage: Stage, demand: Mapping[str, int]) -> float:
    if not stage.instance_ids:
        return float("inf")
    return sum(demand.get(name, 0) for name in stage.instance_ids) / len(stage.instance_ids)
