"""The bid-ask protocol over a view: what its messages would settle, where one scheduler sees both sides.

The rules are those of `bid_ask`: who may bid, half by load, three by earliest start. "First to reply" has no
meaning without a network; in its place stands the lightest of the three.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from zlib import crc32

from tailrace.cluster import ClusterView, InstanceView, RequestView
from tailrace.policy.cascade.bid_ask import EARLIEST, TRANSFERS
from tailrace.policy.ledger import Ledger

# How one of the receivers that may take a request is chosen; there is at least one.
Choice = Callable[[Sequence[InstanceView], RequestView, Ledger], InstanceView]


def open_ledger(view: ClusterView) -> Ledger:
    """Section 5: at most three transfers at a time, each way; what exceeds them stays at its source."""
    return Ledger(view.instances, transfers_in=TRANSFERS, transfers_out=TRANSFERS)


def demand_tokens(instance: InstanceView, ledger: Ledger | None = None) -> int:
    """Request-memory demand of an instance: KV held, queued, and booked to come (section 4.4)."""
    booked = ledger.booked_tokens(instance) if ledger is not None else 0
    return instance.kv_used_tokens + instance.prefill_backlog_tokens + booked


class Receivers:
    """Those of some instances that may still take a transfer in one decision, for many requests in turn.

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
            self._open = [i for i in self._open if ledger.takes_transfers(i)]
            self._most = max(map(self._headroom, self._open), default=-1.0)
        return found

    def _headroom(self, instance: InstanceView) -> float:
        ledger = self._ledger
        return min(ledger.free_tokens(instance), self._limit - demand_tokens(instance, ledger))


def by_bids(receivers: Sequence[InstanceView], request: RequestView, ledger: Ledger) -> InstanceView:
    """Who would win the bidding for a request: `bid_ask.choose` with replies in order of load.

    A receiver's buffer, and with it its earliest start, is told from the number of its open transfers, each
    as long as this request.
    """
    by_load = sorted(receivers, key=lambda i: (demand_tokens(i, ledger), i.instance_id))
    lighter = by_load[: (len(by_load) + 1) // 2]
    # Sorting is stable: among equal starts the lighter come first.
    earliest = sorted(enumerate(lighter), key=lambda at: ledger.transfers_in(at[1]))[:EARLIEST]
    return min(earliest, key=lambda at: at[0])[1]


def in_turn(receivers: Sequence[InstanceView], request: RequestView, ledger: Ledger) -> InstanceView:
    """Whatever their load. A policy keeps no count to turn on: a hash of the request id stands for it."""
    return receivers[crc32(request.request_id.encode()) % len(receivers)]
