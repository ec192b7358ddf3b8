"""Headroom: prefill where most KV is free, and answer elsewhere if that instance is nearly full by then."""

from __future__ import annotations

from collections.abc import Sequence

from tailrace.actions import Action, Migrate, Place, Placement, Refuse
from tailrace.cluster import Arrival, ClusterView, InstanceView, RequestView
from tailrace.policy.base import Policy
from tailrace.policy.parameters import parameter


class Headroom(Policy):
    """Decide two of the five points: where to prefill, and where to answer."""

    full: float = parameter(0.9, "share of KV in use beyond which answers leave", minimum=0.0, maximum=1.0)
    roomy: float = parameter(
        0.7, "share of KV in use below which an instance takes them", minimum=0.0, maximum=1.0
    )
    summary = "most free KV; answers leave an instance that is nearly full"

    def place(self, view: ClusterView, arrival: Arrival, now: float) -> Placement:
        """Choose the instance with most KV left once its queue is prefilled; of equals the first by id."""
        instances = [i for i in view.placeable() if i.instance_id not in arrival.excluded]
        if not instances:
            return Refuse("no active instance")
        return Place(max(instances, key=_free_after_queue).instance_id)

    def on_reasoning_ended(self, view: ClusterView, request: RequestView, now: float) -> Sequence[Action]:
        """Migrate the answer if this instance is nearly full and another one has room."""
        home = view.instances[request.instance_id]
        if request.migrating or _share_in_use(home) <= self.full:
            return ()
        others = [i for i in view.placeable() if i is not home and _share_in_use(i) < self.roomy]
        if not others:
            return ()
        target = max(others, key=_free_after_queue)
        return [Migrate(request.request_id, home.instance_id, target.instance_id, "room to answer")]


def _free_after_queue(instance: InstanceView) -> int:
    return instance.kv_free_tokens - instance.prefill_backlog_tokens


def _share_in_use(instance: InstanceView) -> float:
    # An instance that has not reported yet has no capacity: it counts as full.
    return instance.kv_used_tokens / instance.kv_capacity_tokens if instance.kv_capacity_tokens else 1.0
