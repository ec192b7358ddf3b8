"""Who may get an arriving request."""

from __future__ import annotations

from tailrace.actions import Refuse
from tailrace.cluster import Arrival, ClusterView, InstanceState, InstanceView

NO_INSTANCE = Refuse("no active instance")


def candidates(view: ClusterView, arrival: Arrival) -> list[InstanceView]:
    """Active instances that the arrival does not exclude, in instance-id order."""
    active = InstanceState.ACTIVE
    excluded = arrival.excluded
    if not excluded:
        return [i for i in view.instances.values() if i.state is active]
    return [i for i in view.instances.values() if i.state is active and i.instance_id not in excluded]
