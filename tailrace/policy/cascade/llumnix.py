"""Llumnix (Sun et al., OSDI'24), a baseline of CascadeInfer: load-aware dispatch, and migration from the
fullest to the emptiest instances.

Without priorities and auto-scaling; the defaults are those of its published code ("remaining steps" as load,
threshold 3.0, the shortest request first).
"""

from __future__ import annotations

from collections.abc import Sequence

from tailrace.actions import Action, Place, Placement, Refuse
from tailrace.cluster import Arrival, ClusterView, InstanceView, Phase, RequestState, RequestView
from tailrace.policy.base import Policy
from tailrace.policy.candidates import Ledger, needed_tokens
from tailrace.policy.parameters import parameter


class Llumnix(Policy):
    """Dispatch and migrate by freeness F = (M - sum of V) / B: free blocks per request, less queued demand.

    - `migrate_below`: an instance below this freeness sends requests; one at or above it receives them, and
      must still be at or above it with the received request. In blocks per request, by which each request can
      still grow.
    - `tick_interval_s`: interval between pairings. The published code pairs every 50 ms, on loads polled as
      often; here reports arrive every 100 ms.
    - Each pair moves one request per tick, the shortest ("SJF").
    """

    migrate_below: float = parameter(
        3.0,
        "freeness below which an instance sends requests away, and above which it receives them",
        unit="blocks a request",
        source="Llumnix's published code",
        minimum=0.0,
    )
    tick_interval_s: float = parameter(
        0.1,
        "interval between pairings of instances",
        unit="s",
        source="ours; Llumnix's published code has 0.05 s",
        minimum=0.01,
    )
    transfers: int = parameter(3, "maximum concurrent migrations per instance and direction", minimum=1)
    summary = "Llumnix: dispatch to the freest instance, migration from the fullest to the emptiest"

    def place(self, view: ClusterView, arrival: Arrival, now: float) -> Placement:
        """Place on the instance with the highest freeness."""
        candidates = view.placeable()
        if arrival.excluded:
            candidates = [i for i in candidates if i.instance_id not in arrival.excluded]
        if not candidates:
            return Refuse("no active instance")
        return Place(min(candidates, key=lambda i: (-freeness(i), i.load, i.instance_id)).instance_id)

    def on_tick(self, view: ClusterView, now: float) -> Sequence[Action]:
        """Pair the fullest instance with the emptiest, the second fullest with the second emptiest, and so
        on; migrate one request per pair."""
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
    """Return the free blocks per request after adding `more_tokens` and `more_requests`.

    Queued prompts count as used.
    """
    free = instance.kv_free_tokens - instance.prefill_backlog_tokens - more_tokens
    requests = instance.load + more_requests
    return free / max(1, instance.block_tokens) / max(1, requests)
