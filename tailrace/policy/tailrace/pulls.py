"""Pull a cached prefix from another instance where that takes less time than computing it.

A pull is converted to an equivalent cached prefix: an instance that could pull is treated as holding as many
tokens as would save the same time net of the transfer, and the arrival is placed where it then costs least.
This underestimates the benefit, since the instance serves others during a transfer. Two instances are
compared: the one chosen without pulls, and the one that would be chosen if no prefix were cached.
"""

from __future__ import annotations

from collections.abc import Sequence

from tailrace.cluster import Arrival, CachedTokens, InstanceView
from tailrace.perf.steps import equivalent_tokens, load_s
from tailrace.policy.pulling import most_cached, pull_s
from tailrace.policy.tailrace.costs import Costs
from tailrace.policy.tailrace.offers import OfferPlanner


class Pulls:
    """Add pulls to placements if they pay by the policy's cost model."""

    def __init__(self, costs: Costs, margin: float = 1.0) -> None:
        """`margin`: minimum saving of a pull, as a multiple of its transfer time."""
        self._costs = costs
        self._margin = margin

    def place(
        self,
        offers: OfferPlanner,
        among: Sequence[InstanceView] | None,
        arrival: Arrival,
        chosen: InstanceView,
        now: float,
    ) -> tuple[InstanceView, str]:
        """Return the instance for the arrival, and the id of the instance to pull its prefix from (empty: no
        pull).

        `offers`: those of all instances that may hold the prefix, up to date; `chosen`: the placement without
        a pull; `among`: as in `OfferPlanner.cheapest`.
        """
        holder = most_cached(arrival, offers.instances)
        if holder is None:
            return chosen, ""
        held, tokens = arrival.reported_tokens(holder), arrival.context_tokens
        targets = [chosen]
        if (emptiest := offers.cheapest(among, tokens, now)) is not chosen:
            targets.append(emptiest)
        equivalent: dict[str, CachedTokens] = {}
        pulling: set[str] = set()
        for instance in targets:
            own_cached = arrival.held_on(instance.instance_id)
            cached = self._costs.held_tokens(instance, own_cached)
            with_pull = self.equivalent_tokens(instance, own_cached, held)
            if with_pull is not None:
                cached = with_pull
                pulling.add(instance.instance_id)
            equivalent[instance.instance_id] = CachedTokens(cached, cached)
        if not pulling:
            return chosen, ""
        best = offers.cheapest(targets, tokens, now, equivalent)
        return best, holder if best.instance_id in pulling else ""

    def equivalent_tokens(self, instance: InstanceView, cached: CachedTokens, held: int) -> int | None:
        """Return the tokens on the instance's device that would save as much as pulling what it lacks of the
        `held` tokens; None: a pull does not pay.

        The instance holds `cached` of them, and loads those that are in its host memory.
        """
        if held <= cached.total:
            return None
        steps = self._costs.steps_of(instance)
        lacking = held - cached.total
        nominal_s = self._costs.transfer_s(instance, lacking)
        transfer_s = pull_s(instance, lacking, self._costs.open_s, nominal_s)
        loading_s = load_s(steps, cached.total - cached.device)
        without_s = steps.compute_s(self._costs.held_tokens(instance, cached))
        if steps.compute_s(held) - loading_s - without_s < self._margin * transfer_s:
            return None
        return equivalent_tokens(steps, held, transfer_s + loading_s)
