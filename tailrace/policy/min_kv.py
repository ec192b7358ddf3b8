"""Smallest KV footprint: the placement of PASCAL's FCFS and RR baselines (section V-A)."""

from __future__ import annotations

from typing import Final

from tailrace.actions import Place, Placement
from tailrace.cluster import Arrival, ClusterView, InstanceView
from tailrace.policy.base import Policy
from tailrace.policy.candidates import NO_INSTANCE, candidates, footprint_tokens
from tailrace.policy.parameters import parameter

QUEUED_WEIGHT: Final = parameter(
    1.0,
    "weight of placed prompts without KV in an instance's KV footprint (m_i)",
    source="ours; 0 follows PASCAL literally",
    minimum=0.0,
)


class MinKv(Policy):
    """Place each request on the instance with the smallest KV footprint, and never migrate it (PASCAL,
    section V-A)."""

    queued_weight: float = QUEUED_WEIGHT
    baseline_of = "pascal"
    summary = "each arrival to the instance with the smallest KV footprint; no migration"

    def place(self, view: ClusterView, arrival: Arrival, now: float) -> Placement:
        """Return argmin m_i; the first of equals."""
        instances = candidates(view, arrival)
        if not instances:
            return NO_INSTANCE
        return Place(min(instances, key=self._footprint).instance_id)

    def _footprint(self, instance: InstanceView) -> float:
        return footprint_tokens(instance, self.queued_weight)
