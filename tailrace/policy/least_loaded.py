"""Least loaded: place each arrival on the instance with the least KV used and queued for."""

from __future__ import annotations

from typing import Final

from tailrace.actions import Place, Placement
from tailrace.cluster import Arrival, ClusterView, InstanceView
from tailrace.policy.base import Policy
from tailrace.policy.candidates import NO_INSTANCE, QUEUED_WEIGHT, candidates, footprint_tokens
from tailrace.policy.parameters import parameter

# Values of the parameter `load`.
SHARE: Final = "share"
FOOTPRINT: Final = "footprint"


class LeastLoaded(Policy):
    """Current-load dispatch, the papers' "vLLM" baseline (ARES, section 6.1; Llumnix's dispatch rule); with
    `load=footprint` that of PASCAL's baselines (section V-A)."""

    load: str = parameter(
        SHARE,
        "what is compared: the share of KV used and queued for, then the number of requests; or tokens of KV",
        source="Llumnix's dispatch rule; footprint: PASCAL, section V-A",
        choices=(SHARE, FOOTPRINT),
    )
    queued_weight: float = QUEUED_WEIGHT
    summary = "each arrival to the instance with the least work held and queued"

    def place(self, view: ClusterView, arrival: Arrival, now: float) -> Placement:
        """Return the active instance with the least load, and then the lowest id."""
        instances = candidates(view, arrival)
        if not instances:
            return NO_INSTANCE
        load = _share if self.load == SHARE else self._footprint
        return Place(min(instances, key=load).instance_id)

    def _footprint(self, instance: InstanceView) -> tuple[float, str]:
        return footprint_tokens(instance, self.queued_weight), instance.instance_id


def _share(instance: InstanceView) -> tuple[int, int, str]:
    # In whole thousandths, so that a difference of a few tokens does not outweigh the number of requests.
    demand_tokens = instance.kv_used_tokens + instance.prefill_backlog_tokens
    share = demand_tokens * 1_000 // (instance.kv_capacity_tokens or 1)
    return share, instance.running + instance.waiting, instance.instance_id
