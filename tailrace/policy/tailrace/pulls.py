"""Pull, don't compute: a prefix that another instance holds is fetched where that takes less.

What a transfer takes counts like the prefill of a shorter prompt: an instance that could fetch the prefix is
taken to hold as many tokens as leave the same seconds, and the arrival goes where it then costs least. That
is on the safe side: while KV comes, others are served. Looked at are two instances, where it would go if
nobody could fetch, and where it would go if nobody held anything.
"""

from __future__ import annotations

from collections.abc import Sequence

from tailrace.cluster import Arrival, CachedTokens, InstanceView
from tailrace.perf.reuse import load_s, worth_tokens
from tailrace.policy.pulling import most_cached, pull_s
from tailrace.policy.tailrace.costs import Costs
from tailrace.policy.tailrace.offers import OfferPlanner


class Pulls:
    """Pulls that pay, by one policy's costs."""

    def __init__(self, offers: OfferPlanner, costs: Costs, margin: float = 1.0) -> None:
        """`margin`: how many times its transfer a pull must save."""
        self._offers = offers
        self._costs = costs
        self._margin = margin

    def place(
        self,
        instances: Sequence[InstanceView],
        among: Sequence[InstanceView] | None,
        arrival: Arrival,
        chosen: InstanceView,
        now: float,
    ) -> tuple[InstanceView, str]:
        """Where the arrival goes, and from whom its prefix is fetched (empty: nobody).

        `instances`: all that may hold it; `chosen`: where it goes without a pull; `among`: to choose from, as
        `OfferPlanner.cheapest` takes them, which must know of these instances.
        """
        holder = most_cached(arrival, instances)
        if holder is None:
            return chosen, ""
        held, tokens, offers = arrival.told_tokens(holder), arrival.context_tokens, self._offers
        others = [chosen]
        if (emptiest := offers.cheapest(among, tokens, now)) is not chosen:
            others.append(emptiest)
        as_held: dict[str, CachedTokens] = {}
        pulling: set[str] = set()
        for instance in others:
            own = arrival.held_on(instance.instance_id)
            tokens_there = self._costs.held_tokens(instance, own)
            worth = self.worth(instance, own, held)
            if worth is not None:
                tokens_there = worth
                pulling.add(instance.instance_id)
            as_held[instance.instance_id] = CachedTokens(tokens_there, tokens_there)
        if not pulling:
            return chosen, ""
        best = offers.cheapest(others, tokens, now, as_held)
        return best, holder if best.instance_id in pulling else ""

    def worth(self, instance: InstanceView, own: CachedTokens, held: int) -> int | None:
        """Tokens that its device would have to hold to be as quick as with a pull of what it lacks of `held`.

        It has `own` of them, and loads those that are in its host memory. None: a pull does not pay.
        """
        if held <= own.total:
            return None
        steps = self._costs.steps_of(instance)
        lacking = held - own.total
        nominal_s = self._costs.transfer_s(instance, lacking)
        transfer_s = pull_s(instance, lacking, self._costs.open_s, nominal_s)
        loading_s = load_s(steps, own.total - own.device)
        without_s = steps.compute_s(self._costs.held_tokens(instance, own))
        if steps.compute_s(held) - loading_s - without_s < self._margin * transfer_s:
            return None
        return worth_tokens(steps, held, transfer_s + loading_s)
