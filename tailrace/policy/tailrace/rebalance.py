"""What moves on each tick: requests that a prefill instance still decodes, and, to rebalance, requests from
the instances where they cost most to where they cost least.

The second is ARES's rescheduling and CascadeInfer's rebalancing under the cost model, which expresses memory
pressure, long steps, unequal lengths and the migration itself in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import nlargest, nsmallest
from typing import Final

from tailrace.actions import Migrate
from tailrace.cluster import ClusterView, InstanceView, Phase, Pool, RequestView
from tailrace.policy.tailrace.costs import Costs
from tailrace.policy.tailrace.moves import MovePlanner
from tailrace.policy.tailrace.targets import Decoders, Targets

# Maximum number of handovers per tick, as in Arrow.
_HANDOVERS: Final = 64
# Maximum number of sources per tick; the others have their turn on a later tick.
SOURCES: Final = 8
# Targets per tick, since each source may use up one; and targets per request, three as in bid-ask.
TARGETS: Final = 8
BIDDERS: Final = 3


def late_handovers(mover: MovePlanner, view: ClusterView, decoders: Decoders) -> list[Migrate]:
    """Hand over requests that decode on a prefill instance because no decode instance had room for them;
    oldest first."""
    waiting: list[RequestView] = [
        request
        for instance in view.placeable()
        if instance.pool is Pool.PREFILL and instance.running > 0
        for request in instance.requests
        if request.phase is not Phase.PREFILL and not request.migrating
    ]
    targets = decoders.targets(view)
    moves: list[Migrate] = []
    for request in nsmallest(_HANDOVERS, waiting, key=lambda r: (r.arrival_s, r.request_id)):
        target = mover.cheapest(request, view.instances[request.instance_id], targets)
        if target is not None:
            moves.append(mover.reserve(request, target.instance, "prefill done"))
    return moves


def rebalance(
    mover: MovePlanner, costs: Costs, price: Mapping[str, float], instances: Sequence[InstanceView]
) -> list[Migrate]:
    """Move at most one request per source and per target, the one that saves most; most expensive sources
    first.

    `price`: cost of one more request in seconds, by instance.
    """
    if len(instances) < 2:
        return []
    sources = nlargest(SOURCES, instances, key=lambda i: (price[i.instance_id], i.instance_id))
    targets = nsmallest(TARGETS, instances, key=lambda i: (price[i.instance_id], i.instance_id))
    moves: list[Migrate] = []
    chosen: set[str] = set()
    for source in sources:
        cheaper = [t for t in targets if price[t.instance_id] < price[source.instance_id]]
        cheaper = [t for t in cheaper if t.instance_id not in chosen][:BIDDERS]
        # Otherwise every request of the source is examined in vain.
        accepting = [target for target in cheaper if mover.may_receive_from(source, target)]
        if not accepting or source.migrations_out:
            continue
        best = mover.best_of(source, Targets.of(costs, accepting))
        if best is not None:
            moves.append(mover.reserve(best.request, best.target, "rebalance"))
            chosen.add(best.target.instance_id)
    return moves
