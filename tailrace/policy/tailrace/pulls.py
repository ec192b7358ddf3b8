"""Pull, don't compute: a prefix that another instance holds is fetched where that takes less.

What a transfer takes counts like the prefill of a shorter prompt: an instance that could fetch the prefix is
taken to hold as many tokens as leave the same seconds, and the arrival goes where it then costs least. That
is on the safe side: while KV comes, others are served. Looked at are two instances, where it would go if
nobody could fetch, and where it would go if nobody held anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

from tailrace.cluster import Arrival, CachedTokens, InstanceView
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
            tokens_there = arrival.cached_tokens(instance.instance_id)
            worth = self.worth(instance, tokens_there, held)
            if worth is not None:
                tokens_there = worth
                pulling.add(instance.instance_id)
            as_held[instance.instance_id] = CachedTokens(tokens_there, tokens_there)
        if not pulling:
            return chosen, ""
        best = offers.cheapest(others, tokens, now, as_held)
        return best, holder if best.instance_id in pulling else ""

    def worth(self, instance: InstanceView, own: int, held: int) -> int | None:
        """Tokens that it would have to hold to be as quick as with a pull of what it lacks of `held`.

        It has `own` of them. None: a pull does not pay.
        """
        if held <= own:
            return None
        steps = self._costs.steps_of(instance)
        lacking = held - own
        nominal_s = self._costs.transfer_s(instance, lacking)
        transfer_s = pull_s(instance, lacking, self._costs.open_s, nominal_s)
        whole_s = steps.compute_s(held)
        if whole_s - steps.compute_s(own) < self._margin * transfer_s:
            return None
        left_s = max(0.0, whole_s - transfer_s)
        linear, square = steps.per_token_s, steps.per_token_squared_s
        if square > 0.0:
            return min(held, int((sqrt(linear * linear + 4.0 * square * left_s) - linear) / (2.0 * square)))
        return min(held, int(left_s / linear)) if linear > 0.0 else held
