"""On each tick: from the instances where requests cost most to those where they cost least.

ARES's rescheduling and CascadeInfer's rebalancing in the terms of `costs`: memory pressure, long steps and
unequal lengths are all seconds there, and so is what a migration takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import nlargest, nsmallest
from typing import Final

from tailrace.actions import Migrate
from tailrace.cluster import InstanceView, Phase, RequestState, RequestView
from tailrace.policy.tailrace.costs import Costs
from tailrace.policy.tailrace.moves import Move, MovePlanner

# Sources looked at in one tick: what is left is looked at in the next one, a second later.
SOURCES: Final = 8
# Targets for each: as many as there are sources could use up, and three, as in bid-ask, for a request.
TARGETS: Final = 8
BIDDERS: Final = 3


def rebalance(
    mover: MovePlanner, costs: Costs, price: Mapping[str, float], instances: Sequence[InstanceView]
) -> list[Migrate]:
    """At most one request from a source and to a target, the one that saves most; dearest source first.

    `price`: what one more request costs, by instance.
    """
    if len(instances) < 2:
        return []
    sources = nlargest(SOURCES, instances, key=lambda i: (price[i.instance_id], i.instance_id))
    targets = nsmallest(TARGETS, instances, key=lambda i: (price[i.instance_id], i.instance_id))
    moves: list[Migrate] = []
    taken: set[str] = set()
    for source in sources:
        cheaper = [t for t in targets if price[t.instance_id] < price[source.instance_id]]
        cheaper = [t for t in cheaper if t.instance_id not in taken][:BIDDERS]
        if not cheaper or source.migrations_out:
            continue
        at_least = costs.at_least(cheaper)
        best: Move | None = None
        for request in source.requests:
            if not movable(request):
                continue
            gain_s = 0.0 if best is None else best.gain_s
            move = mover.best(request, source, cheaper, gain_s, at_least)
            if move is not None:
                best = move
        if best is not None:
            moves.append(mover.reserve(best.request, best.target, "rebalance"))
            taken.add(best.target.instance_id)
    return moves


def movable(request: RequestView) -> bool:
    """A prefill cannot be taken away in its middle; what waits on the host cannot either."""
    return (
        request.phase is not Phase.PREFILL and request.state is RequestState.RUNNING and not request.migrating
    )
