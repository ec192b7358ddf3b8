"""Llumnix, as CascadeInfer compares with it: load-aware dispatch, and migration from fullest to emptiest.

Sun et al., OSDI'24, without priorities and scaling; defaults are those of its published code ("remaining
steps" as load, threshold 3.0, the shortest request first).
"""

from __future__ import annotations

from collections.abc import Sequence

from tailrace.actions import Action, Place, Placement, Refuse
from tailrace.cluster import Arrival, ClusterView, InstanceView, Phase, RequestState, RequestView
from tailrace.policy.base import Policy
from tailrace.policy.candidates import Ledger, needed_tokens
from tailrace.policy.parameters import Parameter


class Llumnix(Policy):
    """Freeness F = (M - sum of V) / B: blocks that are neither held nor queued for, a request.

    - `migrate_below`: below it an instance sends, from it on it receives, and must still do so with the
      request that it gets. In blocks a request, which is how many blocks each can still grow by.
    - `tick_interval_s`: how often pairs are made. The published code looks each 50 ms, at loads polled as
      often; reports come each 100 ms here.
    - One request a pair and tick, the shortest ("SJF"): the pair goes on at the next.
    """

    parameters = (
        Parameter(
            "migrate_below",
            float,
            3.0,
            "freeness below which an instance sends requests away, and above which it receives them",
            unit="blocks a request",
            source="Llumnix's published code",
            minimum=0.0,
        ),
        Parameter(
            "tick_interval_s",
            float,
            0.1,
            "interval between pairings of instances",
            unit="s",
            source="ours; Llumnix's published code has 0.05 s",
            minimum=0.01,
        ),
        Parameter("transfers", int, 3, "maximum concurrent migrations per instance and direction", minimum=1),
    )
    baseline_of = "cascade"
    summary = "Llumnix: dispatch to the freest instance, migration from the fullest to the emptiest"

    def __init__(self, migrate_below: float = 3.0, tick_interval_s: float = 0.1, transfers: int = 3) -> None:
        self.migrate_below = migrate_below
        self.tick_interval_s = tick_interval_s
        self.transfers = transfers

    def place(self, view: ClusterView, arrival: Arrival, now: float) -> Placement:
        """The freest instance."""
        candidates = view.placeable()
        if arrival.excluded:
            candidates = [i for i in candidates if i.instance_id not in arrival.excluded]
        if not candidates:
            return Refuse("no active instance")
        return Place(min(candidates, key=lambda i: (-freeness(i), i.load, i.instance_id)).instance_id)

    def on_tick(self, view: ClusterView, now: float) -> Sequence[Action]:
        """The fullest paired with the emptiest, the second fullest with the second emptiest, and so on."""
        by_freeness = sorted(view.placeable(), key=lambda i: (freeness(i), i.instance_id))
        sources = [i for i in by_freeness if freeness(i) < self.migrate_below]
        targets = [i for i in reversed(by_freeness) if freeness(i) >= self.migrate_below]
        ledger = Ledger(view.instances, self.transfers, self.transfers)
        actions: list[Action] = []
        for source, target in zip(sources, targets, strict=False):
            request = self._shortest(source, target, ledger)
            if request is not None:
                actions.append(ledger.reserve(request, target, "load"))
        return actions

    def _shortest(self, source: InstanceView, target: InstanceView, ledger: Ledger) -> RequestView | None:
        fitting = (
            request
            for request in source.requests
            if request.phase is not Phase.PREFILL
            and request.state is RequestState.RUNNING
            and ledger.may_send(source, request)
            and ledger.may_receive(target, request)
            and freeness(target, needed_tokens(request, target), 1) >= self.migrate_below
        )
        return min(fitting, key=lambda r: (r.context_tokens, r.request_id), default=None)


def freeness(instance: InstanceView, more_tokens: int = 0, more_requests: int = 0) -> float:
    """Free blocks a request, with so many tokens and requests more. Queued prompts count as held."""
    free = instance.kv_free_tokens - instance.prefill_backlog_tokens - more_tokens
    requests = instance.load + more_requests
    return free / max(1, instance.block_tokens) / max(1, requests)
