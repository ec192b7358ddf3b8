"""Round robin: each arrival to the next instance in turn, whatever its load."""

from __future__ import annotations

from tailrace.actions import Place, Placement, Refuse
from tailrace.cluster import Arrival, ClusterView
from tailrace.policy.base import Policy


class RoundRobin(Policy):
    """The baseline of all four papers. Turns on the arrival's sequence number, so it keeps no state."""

    summary = "each arrival to the next instance in turn"

    def place(self, view: ClusterView, arrival: Arrival, now: float) -> Placement:
        """The instance at `seq` modulo the number of instances that may get work."""
        candidates = [i for i in view.placeable() if i.instance_id not in arrival.excluded]
        if not candidates:
            return Refuse("no active instance")
        return Place(candidates[arrival.seq % len(candidates)].instance_id)
