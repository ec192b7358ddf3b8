"""Select the requests that instances hand over, and the candidates to receive each (CascadeInfer, section
4.4).

The policy decides by its view which requests are offered, to which instances, and up to which load. The
instances, which know their own state exactly, then choose the receiver by bid-ask (`tailrace.bid_ask`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Protocol
from zlib import crc32

from tailrace.actions import Action, Migrate, Offer
from tailrace.bid_ask import TRANSFERS
from tailrace.cluster import ClusterView, InstanceView, RequestView, Stage
from tailrace.policy.candidates import Ledger
from tailrace.policy.cascade.layout import active_in, earliest_stage
from tailrace.policy.columns import find_request
from tailrace.policy.decoding import decodes, decoding, migrating_tokens

BOUNDARY = "length boundary"
OVERLOADED = "overloaded"


def demand_tokens(instance: InstanceView, ledger: Ledger | None = None) -> int:
    """Return the request-memory demand of an instance: KV used, queued and reserved (section 4.4)."""
    reserved = ledger.reserved_tokens(instance) if ledger is not None else 0
    return instance.kv_used_tokens + instance.prefill_backlog_tokens + reserved


class ReceiverChoice(Protocol):
    """A rule that chooses the receiver of a request from a non-empty list."""

    def __call__(
        self,
        receivers: Sequence[InstanceView],
        request: RequestView,
        ledger: Ledger,
        reason: str,
        most_tokens: int | None,
    ) -> Action:
        """Return the action, reserved in the ledger."""
        ...


def by_bids(
    receivers: Sequence[InstanceView],
    request: RequestView,
    ledger: Ledger,
    reason: str,
    most_tokens: int | None,
) -> Offer:
    """Offer the request to all receivers; the ledger reserves it on the one with the least demand."""
    least = min(receivers, key=lambda i: (demand_tokens(i, ledger), i.instance_id))
    preferred = ledger.reserve(request, least, reason)
    others = (i.instance_id for i in receivers if i is not least)
    return Offer(request.request_id, request.instance_id, (preferred.target_id, *others), reason, most_tokens)


def round_robin(
    receivers: Sequence[InstanceView],
    request: RequestView,
    ledger: Ledger,
    reason: str,
    most_tokens: int | None,
) -> Migrate:
    """Migrate the request to a receiver regardless of load (section 6.5's round robin).

    A policy is stateless, so a hash of the request id takes the place of a counter.
    """
    return ledger.reserve(request, receivers[crc32(request.request_id.encode()) % len(receivers)], reason)


class Handovers:
    """The handovers of one decision, which share a ledger."""

    def __init__(self, view: ClusterView, choose_receiver: ReceiverChoice) -> None:
        self._view = view
        self._choose_receiver = choose_receiver
        # Offers queue at their sender; direct migrations observe section 5's limit of three transfers.
        limit = None if choose_receiver is by_bids else TRANSFERS
        self._ledger = Ledger(view.instances, transfers_in=limit, transfers_out=limit)

    def outgrown(self, stages: Sequence[Stage], requests: Iterable[tuple[int, RequestView]]) -> list[Action]:
        """Hand over the requests that have outgrown their stage to the stage that covers them now.

        `requests`: pairs of (number of the current stage, request). Longest first: they disturb their batch
        the most.
        """
        leaving: list[tuple[int, RequestView]] = []
        for at, request in requests:
            if request.context_tokens >= stages[at].hi and decodes(request):
                to = earliest_stage(stages, request.context_tokens)
                if to > at:
                    leaving.append((to, request))
        leaving.sort(key=lambda found: (-found[1].context_tokens, found[1].request_id))
        receivers: dict[int, _Receivers] = {}
        actions: list[Action] = []
        for to, request in leaving:
            if not self._ledger.may_send(self._view.instances[request.instance_id], request):
                continue
            if to not in receivers:
                receivers[to] = _Receivers(active_in(self._view, stages[to]), self._ledger)
            found = receivers[to].with_room(request)
            if found:
                actions.append(self._choose_receiver(found, request, self._ledger, BOUNDARY, None))
        return actions

    def rebalance(self, peers: Sequence[InstanceView], outlier: float) -> list[Action]:
        """Hand over requests from overloaded instances of one stage to their peers, most overloaded first.

        An instance is overloaded above `outlier` times the mean demand. The paper leaves open which requests
        move, and how many. Here: the longest ones that do not take the sender below the stage's mean, which
        needs the fewest transfers, to peers that do not become overloaded by them.
        """
        if len(peers) < 2:
            return []
        mean = sum(map(demand_tokens, peers)) / len(peers)
        limit = outlier * mean
        actions: list[Action] = []
        outliers = [i for i in peers if demand_tokens(i) > limit]
        outliers.sort(key=lambda i: (-demand_tokens(i), i.instance_id))
        receivers = _Receivers(peers, self._ledger, limit)
        for sender in outliers:
            # Requests that are already migrating away count as gone.
            excess = demand_tokens(sender) - migrating_tokens(sender.requests) - mean
            names, contexts, _ = decoding(sender.requests)
            candidates = [found for found in zip(contexts, names, strict=True) if found[0] <= excess]
            candidates.sort(key=lambda found: (-found[0], found[1]))
            for length, name in candidates:
                if length > excess or not receivers.may_have_room(length):
                    continue
                request = find_request(sender.requests, name)
                if not self._ledger.may_send(sender, request):
                    continue
                found = receivers.with_room(request)
                if found:
                    most_tokens = math.floor(limit)
                    actions.append(
                        self._choose_receiver(found, request, self._ledger, OVERLOADED, most_tokens)
                    )
                    excess -= length
        return actions


class _Receivers:
    """Instances that may receive requests, queried for many requests in turn.

    Within a decision instances only fill up, so those that are full need not be checked again.
    """

    def __init__(self, instances: Sequence[InstanceView], ledger: Ledger, limit: float = math.inf) -> None:
        """`limit`: maximum demand of a receiver including the request, in tokens."""
        self._open = list(instances)
        self._ledger = ledger
        self._limit = limit
        # No instance has room for more tokens than this.
        self._max_headroom: float = math.inf

    def may_have_room(self, length: int) -> bool:
        """Return whether any instance may have room for a request with this context; false: none has."""
        return length <= self._max_headroom

    def with_room(self, request: RequestView) -> list[InstanceView]:
        """Return the instances that have room for the request, in the order given."""
        length = request.context_tokens
        if not self.may_have_room(length):
            return []
        ledger, limit = self._ledger, self._limit
        found = [i for i in self._open if ledger.may_receive(i, request)]
        if limit < math.inf:
            found = [i for i in found if demand_tokens(i, ledger) + length <= limit]
        if not found:
            self._open = [i for i in self._open if ledger.accepts_transfers(i)]
            self._max_headroom = max(map(self._headroom, self._open), default=-1.0)
        return found

    def _headroom(self, instance: InstanceView) -> float:
        ledger = self._ledger
        return min(ledger.free_tokens(instance), self._limit - demand_tokens(instance, ledger))
