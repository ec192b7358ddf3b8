"""Pull a cached prefix from another instance where that takes less time than computing it.

A pull is converted to an equivalent cached prefix: an instance that could pull is treated as holding as many
tokens as would save the same time net of the transfer, and the arrival is placed where it then costs least.
This underestimates the benefit, since the instance serves others during a transfer. Two instances are
compared: the one chosen without pulls, and the one that would be chosen if no prefix were cached.
"""

from __future__ import annotations

import numpy as np

from tailrace.cluster import Arrival, CachedTokens, InstanceView
from tailrace.perf.steps import Floats, equivalent_tokens, load_s
from tailrace.policy.pulling import most_cached, pull_s
from tailrace.policy.tailrace.costs import Costs, Offers


def with_pull(
    offers: Offers, arrival: Arrival, chosen: int, usable_tokens: Floats | float, now: float, margin: float
) -> tuple[int, str]:
    """Return the position of the instance for the arrival, and the id of the instance to pull its prefix from
    (empty: no pull).

    `chosen`: the placement without a pull; `usable_tokens`: as in `Offers.arrival_s`; `margin`: minimum
    saving of a pull, as a multiple of its transfer time.
    """
    holder = most_cached(arrival, offers.instances)
    if holder is None:
        return chosen, ""
    emptiest = int(offers.arrival_s(arrival, 0.0, now).argmin())
    with_pulls, pulling = np.array(usable_tokens, dtype=np.float64), set[int]()
    for position in {chosen, emptiest}:
        instance = offers.instances[position]
        cached, held = arrival.held_on(instance.instance_id), arrival.reported_tokens(holder)
        tokens = tokens_with_pull(offers.costs, instance, cached, held, margin)
        if tokens is not None:
            with_pulls[position] = tokens
            pulling.add(position)
    if not pulling:
        return chosen, ""
    costs_s = offers.arrival_s(arrival, with_pulls, now)
    best = emptiest if costs_s[emptiest] < costs_s[chosen] else chosen
    return best, holder if best in pulling else ""


def tokens_with_pull(
    costs: Costs, instance: InstanceView, cached: CachedTokens, held: int, margin: float
) -> int | None:
    """Return the tokens on the instance's device that would save as much as pulling what it lacks of the
    `held` tokens of a prefix; None: a pull does not pay.

    The instance holds `cached` of them, and loads those that are in its host memory. `margin`: minimum
    saving, as a multiple of the transfer time.
    """
    if held <= cached.total:
        return None
    steps, lacking = costs.steps_of(instance), held - cached.total
    transfer_s = pull_s(instance, lacking, costs.open_s, costs.transfer_s(instance, lacking))
    loading_s = load_s(steps, cached.total - cached.device)
    without_s = steps.compute_s(costs.usable_tokens(instance, cached))
    if steps.compute_s(held) - loading_s - without_s < margin * transfer_s:
        return None
    return equivalent_tokens(steps, held, transfer_s + loading_s)
