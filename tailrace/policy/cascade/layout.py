"""Stages as a whole: which one a length belongs to, and what becomes of them when instances come and go."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from tailrace.cluster import ClusterView, InstanceState, InstanceView, Stage


def earliest_stage(stages: Sequence[Stage], length: int) -> int:
    """Number of the earliest stage whose range covers a length (section 3.2); the last, for all beyond."""
    for at, stage in enumerate(stages):
        if length < stage.hi:
            return at
    return len(stages) - 1


def stage_of(stages: Sequence[Stage], instance_id: str) -> int | None:
    """Number of the stage that an instance serves."""
    return next((at for at, stage in enumerate(stages) if instance_id in stage.instance_ids), None)


def active_in(view: ClusterView, stage: Stage) -> list[InstanceView]:
    """Instances of a stage that get new work, in its order."""
    active = InstanceState.ACTIVE
    found = (view.instances.get(name) for name in stage.instance_ids)
    return [i for i in found if i is not None and i.state is active]


def nearest_first(count: int, at: int) -> list[int]:
    """Stage numbers by distance from `at`, longer lengths first: what serves longer can serve shorter."""
    return sorted(range(count), key=lambda other: (abs(other - at), -other))


def tiles(stages: Sequence[Stage], max_length: int) -> bool:
    """The ranges follow each other from 0 to max_length, none empty, each with instances of its own."""
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
    """The stages with exactly these instances.

    Those that are gone are left out; a stage without any gives its range to the stage before it (the first,
    to the one after). A new instance goes to a stage that has lost all of its own, else to the one with the
    most demand an instance (`demand`: KV tokens held and queued, by instance). Without instances there are
    no stages.
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
