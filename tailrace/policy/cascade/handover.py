"""Select the requests that instances hand over, and the candidates to receive each (CascadeInfer, section
4.4).

The policy decides by its view which requests are offered, to which instances, and up to which load. The
instances, which know their own state exactly, then choose the receiver by bid-ask (`tailrace.bid_ask`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop
from typing import Final, Protocol
from zlib import crc32

import numpy as np

from tailrace.actions import Action, Migrate, Offer
from tailrace.cluster import ClusterView, InstanceView, RequestView, Stage
from tailrace.handover import TRANSFERS
from tailrace.policy.cascade.layout import Positions, earliest_stage
from tailrace.policy.cascade.room import Room, RoomOfInstances
from tailrace.policy.requests import decodes, table_of

BOUNDARY = "length boundary"
OVERLOADED = "overloaded"

# Handovers open at once, beyond which a tick orders none. A scheduler carries out 512 actions at a time and
# drops the others, whatever they are: an eighth is left for stages and prompts.
HANDOVERS_MAX: Final = 448
# Handovers within one stage that a tick orders: with a thousand instances, more would delay placements. Those
# left over have their turn on the next tick.
REBALANCED_MAX: Final = 128
# Receivers that bid for one request, those with the least demand. The paper asks all of a stage, which has
# four instances there, and ignores the bids of the half with more load.
RECEIVERS_MAX: Final = 64


class ReceiverChoice(Protocol):
    """A rule that chooses the receiver of a request from a non-empty list."""

    def __call__(
        self, receivers: Positions, request: RequestView, room: Room, reason: str, most_tokens: int | None
    ) -> Action:
        """Return the action, with its room reserved."""
        ...


def by_bids(
    receivers: Positions, request: RequestView, room: Room, reason: str, most_tokens: int | None
) -> Offer:
    """Offer the request to the receivers with the least demand; room is reserved on the first of them."""
    asked = room.least_demand(receivers, RECEIVERS_MAX).tolist()
    room.reserve(request, asked[0])
    names = tuple([room.names[n] for n in asked])
    return Offer(request.request_id, request.instance_id, names, reason, most_tokens)


def round_robin(
    receivers: Positions, request: RequestView, room: Room, reason: str, most_tokens: int | None
) -> Migrate:
    """Migrate the request to a receiver regardless of load (section 6.5's round robin).

    A policy is stateless, so a hash of the request id takes the place of a counter.
    """
    target = int(receivers[crc32(request.request_id.encode()) % len(receivers)])
    room.reserve(request, target)
    return Migrate(request.request_id, request.instance_id, room.names[target], reason)


class Handovers:
    """The handovers of one decision, which share its room."""

    def __init__(self, view: ClusterView, rooms: RoomOfInstances, choose_receiver: ReceiverChoice) -> None:
        self._view = view
        self._choose_receiver = choose_receiver
        # Offers queue at their sender; direct migrations observe section 5's limit of three transfers.
        self._room = rooms.of(view, None if choose_receiver is by_bids else TRANSFERS)

    def crossed(self, stages: Sequence[Stage], at: int, request: RequestView) -> list[Action]:
        """Hand over a request that has outgrown the stage with this number to the one that covers it now."""
        context = request.context_tokens
        to = earliest_stage(stages, context)
        if context < stages[at].hi or to <= at or not decodes(request):
            return []
        source = self._view.instances[request.instance_id]
        return self._hand_over(source, request, self._receivers(stages[to]), BOUNDARY, None)

    def outgrown(self, stages: Sequence[Stage]) -> list[Action]:
        """Hand over the requests that have outgrown their stage to the stage that covers them now.

        Longest first: they disturb their batch the most. At most `HANDOVERS_MAX` are open afterwards.
        """
        leaving = list(self._leaving(stages))
        heapify(leaving)
        receivers: dict[int, _Receivers] = {}
        actions: list[Action] = []
        while leaving and self._room.handovers < HANDOVERS_MAX:
            shortness, _, _, at, source, row = heappop(leaving)
            to = earliest_stage(stages, -shortness)
            if to <= at:
                continue
            if to not in receivers:
                receivers[to] = self._receivers(stages[to])
            if receivers[to].may_have_room(-shortness):
                request = table_of(source.requests).view(row)
                actions += self._hand_over(source, request, receivers[to], BOUNDARY, None)
        return actions

    def _leaving(self, stages: Sequence[Stage]) -> Iterator[tuple[int, str, int, int, InstanceView, int]]:
        """Yield (less the context, id, number, number of the stage, source, row there) for requests that
        decode beyond the end of their stage; none of the last."""
        number = 0
        for at, stage in enumerate(stages[:-1]):
            for name in stage.instance_ids:
                source = self._view.instances[name]
                requests = table_of(source.requests)
                contexts, ids = requests.context_tokens, requests.ids
                for row in np.flatnonzero(requests.decoding & (contexts >= stage.hi)).tolist():
                    yield -int(contexts[row]), ids[row], number, at, source, row
                    number += 1

    def rebalance(self, stage: Stage | None, outlier: float) -> list[Action]:
        """Hand over requests from overloaded instances of one stage to their peers, most overloaded first.

        Without a stage the whole cluster is one. An instance is overloaded above `outlier` times the mean
        demand. The paper leaves open which requests move, and how many. Here: the longest ones that do not
        take the sender below the stage's mean, which needs the fewest transfers, to peers that do not become
        overloaded by them. At most `REBALANCED_MAX`, and at most `HANDOVERS_MAX` are open afterwards.
        """
        room = self._room
        peers = room.active(stage)
        if len(peers) < 2:
            return []
        demand = room.demand[peers]
        mean = float(demand.sum()) / len(peers)
        limit = outlier * mean
        actions: list[Action] = []
        outliers = sorted(
            (-load, n) for n, load in zip(peers.tolist(), demand.tolist(), strict=True) if load > limit
        )
        receivers = _Receivers(peers, room, limit)
        for less_demand, position in outliers:
            sender = room.instance(position)
            # Requests that are already migrating away count as gone.
            requests = table_of(sender.requests)
            contexts, ids = requests.context_tokens, requests.ids
            excess = -less_demand - int(contexts[requests.migrating].sum()) - mean
            rows = np.flatnonzero(requests.decoding & (contexts <= excess)).tolist()
            longest_first = sorted((-int(contexts[row]), ids[row], row) for row in rows)
            for less_length, _, row in longest_first:
                length = -less_length
                if room.handovers >= HANDOVERS_MAX or len(actions) >= REBALANCED_MAX:
                    return actions
                if length > excess or not receivers.may_have_room(length):
                    continue
                request = requests.view(row)
                ordered = self._hand_over(sender, request, receivers, OVERLOADED, math.floor(limit))
                if ordered:
                    actions += ordered
                    excess -= length
        return actions

    def _receivers(self, stage: Stage) -> _Receivers:
        return _Receivers(self._room.active(stage), self._room)

    def _hand_over(
        self,
        source: InstanceView,
        request: RequestView,
        receivers: _Receivers,
        reason: str,
        most_tokens: int | None,
    ) -> list[Action]:
        """Return the handover of one request; [] if it may not be sent or no receiver has room."""
        if not self._room.may_send(source, request):
            return []
        found = receivers.with_room(request)
        if not len(found):
            return []
        return [self._choose_receiver(found, request, self._room, reason, most_tokens)]


class _Receivers:
    """Instances that may receive requests, queried for many requests in turn.

    Within a decision instances only fill up, so once none had room for a request, a longer one need not be
    compared with all of them.
    """

    def __init__(self, among: Positions, room: Room, limit: float = math.inf) -> None:
        """`limit`: maximum demand of a receiver including the request, in tokens."""
        self._among = among
        self._room = room
        self._limit = limit
        # No instance has room for more tokens than this.
        self._max_headroom: float = math.inf

    def may_have_room(self, length: int) -> bool:
        """Return whether any instance may have room for a request with this context; false: none has."""
        return length <= self._max_headroom

    def with_room(self, request: RequestView) -> Positions:
        """Return the instances that have room for the request, in the order given."""
        if self.may_have_room(request.context_tokens):
            found: Positions = self._among[self._room.for_request(request, self._limit)[self._among]]
            if len(found):
                return found
            self._max_headroom = self._room.headroom(self._among, self._limit)
        return self._among[:0]
