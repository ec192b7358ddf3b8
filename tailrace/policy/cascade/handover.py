"""Which requests an instance hands over, and who may take each (CascadeInfer, section 4.4).

Who does take it is found by bid-ask (`bid_ask`) among instances that know themselves exactly; here it is
decided by the view which requests are offered, to whom, and up to which load.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Protocol
from zlib import crc32

from tailrace.actions import Action, Migrate, Offer
from tailrace.bid_ask import TRANSFERS
from tailrace.cluster import ClusterView, InstanceView, Phase, RequestView, Stage
from tailrace.policy.candidates import Ledger
from tailrace.policy.cascade.layout import active_in, earliest_stage

BOUNDARY = "length boundary"
OVERLOADED = "overloaded"


def demand_tokens(instance: InstanceView, ledger: Ledger | None = None) -> int:
    """Request-memory demand of an instance: KV held, queued, and booked to come (section 4.4)."""
    booked = ledger.reserved_tokens(instance) if ledger is not None else 0
    return instance.kv_used_tokens + instance.prefill_backlog_tokens + booked


class Settle(Protocol):
    """How a receiver of a request is found; there is at least one."""

    def __call__(
        self,
        receivers: Sequence[InstanceView],
        request: RequestView,
        ledger: Ledger,
        reason: str,
        most_tokens: int | None,
    ) -> Action:
        """The action, booked in the ledger."""
        ...


def by_bids(
    receivers: Sequence[InstanceView],
    request: RequestView,
    ledger: Ledger,
    reason: str,
    most_tokens: int | None,
) -> Offer:
    """All of them are asked. What comes after counts the request where there is the least demand."""
    least = min(receivers, key=lambda i: (demand_tokens(i, ledger), i.instance_id))
    booked = ledger.reserve(request, least, reason)
    others = (i.instance_id for i in receivers if i is not least)
    return Offer(request.request_id, request.instance_id, (booked.target_id, *others), reason, most_tokens)


def in_turn(
    receivers: Sequence[InstanceView],
    request: RequestView,
    ledger: Ledger,
    reason: str,
    most_tokens: int | None,
) -> Migrate:
    """Whatever their load (section 6.5's round robin). A policy keeps no count to turn on: a hash of the
    request id stands for it. Section 5: at most three transfers at a time."""
    return ledger.reserve(request, receivers[crc32(request.request_id.encode()) % len(receivers)], reason)


class Handovers:
    """Handovers of one decision, so that they add up."""

    def __init__(self, view: ClusterView, settle: Settle) -> None:
        self._view = view
        self._settle = settle
        # An offer waits for its turn at its sender; what is ordered outright goes within section 5's limit.
        most = None if settle is by_bids else TRANSFERS
        self._ledger = Ledger(view.instances, transfers_in=most, transfers_out=most)

    def outgrown(self, stages: Sequence[Stage], requests: Iterable[tuple[int, RequestView]]) -> list[Action]:
        """Those of (number of the stage where it is, request) that belong to a later stage, to that one.

        Longest first: they disturb their batch the most.
        """
        leaving: list[tuple[int, RequestView]] = []
        for at, request in requests:
            if request.context_tokens >= stages[at].hi and movable(request):
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
            found = receivers[to].of(request)
            if found:
                actions.append(self._settle(found, request, self._ledger, BOUNDARY, None))
        return actions

    def rebalance(self, peers: Sequence[InstanceView], outlier: float) -> list[Action]:
        """Overloaded outliers of one stage hand requests to their peers, worst first.

        The paper does not say which requests, nor when to stop: the longest that do not take the sender
        below the stage's mean (the fewest transfers), to peers that do not become outliers by it.
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
            # What is under way from it already will be gone.
            leaving = sum(r.context_tokens for r in sender.requests if r.migrating)
            excess = demand_tokens(sender) - leaving - mean
            candidates = [r for r in sender.requests if movable(r) and r.context_tokens <= excess]
            candidates.sort(key=lambda r: (-r.context_tokens, r.request_id))
            for request in candidates:
                length = request.context_tokens
                if length > excess or not self._ledger.may_send(sender, request):
                    continue
                found = receivers.of(request)
                if found:
                    actions.append(self._settle(found, request, self._ledger, OVERLOADED, math.floor(limit)))
                    excess -= length
        return actions


def movable(request: RequestView) -> bool:
    """A prefill cannot be taken away in its middle; it is soon over."""
    return request.phase is not Phase.PREFILL and not request.migrating


class _Receivers:
    """Those of some instances that by the view may still take a request, for many requests in turn.

    A decision asks of hundreds of requests, and only gives away: who is full stays full.
    """

    def __init__(self, instances: Sequence[InstanceView], ledger: Ledger, limit: float = math.inf) -> None:
        """`limit`: demand that a receiver must not exceed with the request."""
        self._open = list(instances)
        self._ledger = ledger
        self._limit = limit
        # No request of more tokens than this finds anybody.
        self._most: float = math.inf

    def of(self, request: RequestView) -> list[InstanceView]:
        """Who has room for the request, in the order given."""
        length = request.context_tokens
        if length > self._most:
            return []
        ledger, limit = self._ledger, self._limit
        found = [i for i in self._open if ledger.may_receive(i, request)]
        if limit < math.inf:
            found = [i for i in found if demand_tokens(i, ledger) + length <= limit]
        if not found:
            self._open = [i for i in self._open if ledger.accepts_transfers(i)]
            self._most = max(map(self._headroom, self._open), default=-1.0)
        return found

    def _headroom(self, instance: InstanceView) -> float:
        ledger = self._ledger
        return min(ledger.free_tokens(instance), self._limit - demand_tokens(instance, ledger))
