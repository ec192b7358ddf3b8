"""If length stages are set: which instances may take a request (CascadeInfer, sections 3.2 and 4.4)."""

from __future__ import annotations

from collections.abc import Sequence

from tailrace.cluster import ClusterView, InstanceState, InstanceView, Stage
from tailrace.policy.cascade.layout import earliest_stage, nearest_first, stage_of


def within_stage(view: ClusterView, usable: Sequence[InstanceView], tokens: int) -> Sequence[InstanceView]:
    """Return the instances of `usable` in the earliest stage for the length, else in the nearest stage that
    has any."""
    stages = view.stages
    if not stages:
        return usable
    names = {i.instance_id: i for i in usable}
    for number in nearest_first(len(stages), earliest_stage(stages, tokens)):
        members = [names[name] for name in stages[number].instance_ids if name in names]
        if members:
            return members
    return usable


def next_stage(view: ClusterView, instance_id: str, tokens: int) -> list[InstanceView]:
    """Return the active instances of the stage for the length if it is later than the instance's own."""
    at = stage_of(view.stages, instance_id)
    if at is None:
        return []
    to = earliest_stage(view.stages, tokens)
    return _active(view, view.stages[to]) if to > at else []


def groups(view: ClusterView, instances: Sequence[InstanceView]) -> list[list[InstanceView]]:
    """Group the instances that may exchange requests on a tick: by stage; without stages, all in one."""
    if not view.stages:
        return [list(instances)]
    allowed = {i.instance_id for i in instances}
    return [[i for i in _active(view, stage) if i.instance_id in allowed] for stage in view.stages]


def _active(view: ClusterView, stage: Stage) -> list[InstanceView]:
    active = InstanceState.ACTIVE
    members = (view.instances.get(name) for name in stage.instance_ids)
    return [i for i in members if i is not None and i.state is active]
