"""CascadeInfer's handovers, request by request and receiver by receiver: a reference for those by column."""

from __future__ import annotations

import math
from collections.abc import Sequence
from zlib import crc32

from tailrace.actions import Action, Offer
from tailrace.cluster import ClusterView, InstanceView, RequestView, Stage
from tailrace.handover import TRANSFERS
from tailrace.policy.candidates import Ledger
from tailrace.policy.cascade.layout import active_in, earliest_stage
from tailrace.policy.requests import decodes


def demand_tokens(instance: InstanceView, ledger: Ledger) -> int:
    return instance.kv_used_tokens + instance.prefill_backlog_tokens + ledger.reserved_tokens(instance)


class PlainHandovers:
    def __init__(self, view: ClusterView, by_bids: bool) -> None:
        limit = None if by_bids else TRANSFERS
        self._view = view
        self._by_bids = by_bids
        self._ledger = Ledger(view.instances, limit, limit)

    def outgrown(self, stages: Sequence[Stage], requests: Sequence[tuple[int, RequestView]]) -> list[Action]:
        leaving = [
            (earliest_stage(stages, request.context_tokens), at, request)
            for at, request in requests
            if request.context_tokens >= stages[at].hi and decodes(request)
        ]
        leaving.sort(key=lambda found: (-found[2].context_tokens, found[2].request_id))
        actions: list[Action] = []
        for to, at, request in leaving:
            if to > at:
                receivers = active_in(self._view, stages[to])
                actions += self._hand_over(request, receivers, "length boundary", math.inf)
        return actions

    def of_all(self, stages: Sequence[Stage]) -> list[Action]:
        held = [
            (at, request)
            for at, stage in enumerate(stages[:-1])
            for name in stage.instance_ids
            for request in self._view.instances[name].requests
        ]
        return self.outgrown(stages, held)

    def rebalance(self, peers: Sequence[InstanceView], outlier: float) -> list[Action]:
        if len(peers) < 2:
            return []
        nothing = Ledger({}, None, None)
        demand = {i.instance_id: demand_tokens(i, nothing) for i in peers}
        mean = sum(demand.values()) / len(peers)
        actions: list[Action] = []
        outliers = [i for i in peers if demand[i.instance_id] > outlier * mean]
        for sender in sorted(outliers, key=lambda i: (-demand[i.instance_id], i.instance_id)):
            leaving = sum(r.context_tokens for r in sender.requests if r.migrating)
            excess = demand[sender.instance_id] - leaving - mean
            for request in sorted(
                filter(decodes, sender.requests), key=lambda r: (-r.context_tokens, r.request_id)
            ):
                if request.context_tokens <= excess:
                    ordered = self._hand_over(request, peers, "overloaded", outlier * mean)
                    excess -= request.context_tokens * len(ordered)
                    actions += ordered
        return actions

    def _hand_over(
        self, request: RequestView, receivers: Sequence[InstanceView], reason: str, limit: float
    ) -> list[Action]:
        ledger = self._ledger
        if not ledger.may_send(self._view.instances[request.instance_id], request):
            return []
        length = request.context_tokens
        found = [
            i
            for i in receivers
            if ledger.may_receive(i, request) and demand_tokens(i, ledger) + length <= limit
        ]
        if not found:
            return []
        if not self._by_bids:
            chosen = found[crc32(request.request_id.encode()) % len(found)]
            return [ledger.reserve(request, chosen, reason)]
        least = min(found, key=lambda i: (demand_tokens(i, ledger), i.instance_id))
        ledger.reserve(request, least, reason)
        names = (least.instance_id, *(i.instance_id for i in found if i is not least))
        most_tokens = None if limit == math.inf else math.floor(limit)
        return [Offer(request.request_id, request.instance_id, names, reason, most_tokens)]
