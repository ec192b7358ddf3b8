"""If pools are set: which instances may prefill, and which may decode (Arrow, sections 5.2 to 5.4).

Pools are an explicit decision to separate prefill from decode, so they take precedence over the cost model: a
request leaves a prefill instance to decode whether or not that pays. Arrow's own rules choose the members.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nsmallest
from typing import Final

from tailrace.actions import Migrate
from tailrace.cluster import ClusterView, InstanceView, Phase, Pool, RequestView
from tailrace.policy.tailrace.moves import MovePlanner

PREFILL_SIDE: Final = (Pool.PREFILL, Pool.DECODE_TO_PREFILL)
DECODE_SIDE: Final = (Pool.DECODE, Pool.PREFILL_TO_DECODE)
# Maximum number of handovers per tick, as in Arrow.
_HANDOVERS: Final = 64


def pooled(view: ClusterView) -> bool:
    """Return whether any instance is in a pool."""
    return any(i.pool is not None for i in view.instances.values())


def prefillers(instances: Sequence[InstanceView]) -> list[InstanceView]:
    """Return the instances on the prefill side or in no pool; if there are none, all, since any instance can
    prefill."""
    return [i for i in instances if i.pool not in DECODE_SIDE] or list(instances)


def decoders(instances: Sequence[InstanceView]) -> list[InstanceView]:
    """Return the instances on the decode side or in no pool."""
    return [i for i in instances if i.pool not in PREFILL_SIDE]


def late_handovers(mover: MovePlanner, view: ClusterView) -> list[Migrate]:
    """Hand over requests that decode on a prefill instance because no decode instance had room for them;
    oldest first."""
    waiting: list[RequestView] = [
        request
        for instance in view.placeable()
        if instance.pool is Pool.PREFILL and instance.running > 0
        for request in instance.requests
        if request.phase is not Phase.PREFILL and not request.migrating
    ]
    targets = decoders(view.placeable())
    moves: list[Migrate] = []
    for request in nsmallest(_HANDOVERS, waiting, key=lambda r: (r.arrival_s, r.request_id)):
        found = mover.cheapest(request, view.instances[request.instance_id], targets)
        if found is not None:
            moves.append(mover.reserve(request, found[0], "prefill done"))
    return moves
