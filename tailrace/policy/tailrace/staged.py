"""Where length stages are set: who may take a request of some length (CascadeInfer, sections 3.2 and 4.4)."""

from __future__ import annotations

from collections.abc import Sequence

from tailrace.cluster import ClusterView, InstanceState, InstanceView, Stage
from tailrace.policy.cascade.layout import earliest_stage, nearest_first, stage_of


def within_stage(view: ClusterView, usable: Sequence[InstanceView], tokens: int) -> Sequence[InstanceView]:
    """Those of `usable` in the earliest stage for the length; the nearest stage, if it has none of them."""
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
    """Active instances of the stage for the length, if that is later than the instance's own."""
    at = stage_of(view.stages, instance_id)
    if at is None:
        return []
    to = earliest_stage(view.stages, tokens)
    return _active(view, view.stages[to]) if to > at else []


def groups(view: ClusterView, instances: Sequence[InstanceView]) -> list[list[InstanceView]]:
    """Who may give requests to each other on a tick: the members of a stage; without stages everybody."""
    if not view.stages:
        return [list(instances)]
    allowed = {i.instance_id for i in instances}
    return [[i for i in _active(view, stage) if i.instance_id in allowed] for stage in view.stages]


def _active(view: ClusterView, stage: Stage) -> list[InstanceView]:
    active = InstanceState.ACTIVE
    found = (view.instances.get(name) for name in stage.instance_ids)
    return [i for i in found if i is not None and i.state is active]
