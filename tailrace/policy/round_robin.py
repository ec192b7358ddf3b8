"""Round robin: place each arrival on the next instance in turn, regardless of load."""

from __future__ import annotations

from tailrace.actions import Place, Placement, Refuse
from tailrace.cluster import Arrival, ClusterView
from tailrace.policy.base import Policy


class RoundRobin(Policy):
    """The baseline of all four papers. Stateless: it takes turns by the arrival's sequence number."""

    summary = "each arrival to the next instance in turn"

    def place(self, view: ClusterView, arrival: Arrival, now: float) -> Placement:
        """Return the active instance at index `seq` modulo their number."""
        candidates = [i for i in view.placeable() if i.instance_id not in arrival.excluded]
        if not candidates:
            return Refuse("no active instance")
        return Place(candidates[arrival.seq % len(candidates)].instance_id)
