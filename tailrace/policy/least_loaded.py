"""Least loaded: place each arrival on the instance with the smallest share of KV used and queued for."""

from __future__ import annotations

from tailrace.actions import Place, Placement, Refuse
from tailrace.cluster import Arrival, ClusterView, InstanceView
from tailrace.policy.base import Policy


class LeastLoaded(Policy):
    """Current-load dispatch, the papers' "vLLM" baseline (ARES, section 6.1; Llumnix's dispatch rule)."""

    summary = "each arrival to the instance with the least work held and queued"

    def place(self, view: ClusterView, arrival: Arrival, now: float) -> Placement:
        """Return the active instance with the least (share of KV used and queued for, requests, id)."""
        candidates = view.placeable()
        if arrival.excluded:
            candidates = [i for i in candidates if i.instance_id not in arrival.excluded]
        if not candidates:
            return Refuse("no active instance")
        return Place(min(candidates, key=_load_key).instance_id)


def _load_key(instance: InstanceView) -> tuple[int, int, str]:
    # In whole thousandths, so that a difference of a few tokens does not outweigh the number of requests.
    demand_tokens = instance.kv_used_tokens + instance.prefill_backlog_tokens
    share = demand_tokens * 1_000 // (instance.kv_capacity_tokens or 1)
    return share, instance.running + instance.waiting, instance.instance_id
