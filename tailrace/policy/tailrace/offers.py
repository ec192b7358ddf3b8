"""Offers of instances, kept as long as the reports that they were worked out from.

Nothing is decided by what is kept: an offer follows from its view and the costs alone. Between two
placements only few of a thousand instances have reported, and to work out the others anew would be most of
what a placement takes.
"""

from __future__ import annotations

from collections.abc import Sequence

from tailrace.cluster import InstanceView
from tailrace.policy.tailrace.costs import Costs, Offer


class Offers:
    """One policy's."""

    def __init__(self) -> None:
        self._costs: Costs | None = None
        self._kept: dict[str, Offer] = {}

    def of(self, costs: Costs, instances: Sequence[InstanceView]) -> list[Offer]:
        """In the order of the instances."""
        kept = self._kept
        if costs is not self._costs or len(kept) > 2 * len(instances) + 64:
            # Instances that have gone must not stay here for ever.
            self._costs = costs
            kept.clear()
        offers: list[Offer] = []
        for instance in instances:
            offer = kept.get(instance.instance_id)
            if offer is None or offer.instance is not instance:
                offer = kept[instance.instance_id] = costs.offer(instance)
            offers.append(offer)
        return offers
