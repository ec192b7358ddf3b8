"""The bid-ask protocol over a view: what its messages would settle, where one scheduler sees both sides.

The rules are those of `bid_ask`: who may bid, half by load, three by earliest start. "First to reply" has no
meaning without a network; in its place stands the lightest of the three.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final
from zlib import crc32

from tailrace.cluster import ClusterView, InstanceView, RequestView
from tailrace.policy.cascade.bid_ask import TRANSFERS, Bid, choose
from tailrace.policy.ledger import Ledger

# How one of the receivers that may take a request is chosen; there is at least one.
Choice = Callable[[Sequence[InstanceView], RequestView, Ledger], InstanceView]

# Any number will do: all receivers are given the same throughput.
_TOKENS_PER_S: Final = 1e5


def open_ledger(view: ClusterView) -> Ledger:
    """Section 5: at most three transfers at a time, each way; what exceeds them stays at its source."""
    return Ledger(view.instances, transfers_in=TRANSFERS, transfers_out=TRANSFERS)


def demand_tokens(instance: InstanceView, ledger: Ledger | None = None) -> int:
    """Request-memory demand of an instance: KV held, queued, and booked to come (section 4.4)."""
    booked = ledger.booked_tokens(instance) if ledger is not None else 0
    return instance.kv_used_tokens + instance.prefill_backlog_tokens + booked


def by_bids(receivers: Sequence[InstanceView], request: RequestView, ledger: Ledger) -> InstanceView:
    """Who would win the bidding for a request.

    A receiver's buffer is estimated from the number of its open transfers, each as long as this request.
    """
    length = request.context_tokens
    bids = [
        Bid(
            receiver=instance.instance_id,
            request_id=request.request_id,
            load=demand_tokens(instance, ledger),
            earliest_s=ledger.transfers_in(instance) * length / _TOKENS_PER_S,
        )
        for instance in sorted(receivers, key=lambda i: (demand_tokens(i, ledger), i.instance_id))
    ]
    won = choose(bids)
    assert won is not None
    return next(i for i in receivers if i.instance_id == won.receiver)


def in_turn(receivers: Sequence[InstanceView], request: RequestView, ledger: Ledger) -> InstanceView:
    """Whatever their load. A policy keeps no count to turn on: a hash of the request id stands for it."""
    return receivers[crc32(request.request_id.encode()) % len(receivers)]
