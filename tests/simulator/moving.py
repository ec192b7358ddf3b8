"""A policy that migrates requests by their IDs alone, to exercise migration."""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

from tailrace.actions import Action, Migrate, Place, Placement
from tailrace.cluster import Arrival, ClusterView, RequestView
from tailrace.policy.base import Policy


class MoveEverything(Policy):
    summary = "moves every request at every decision point"
    tick_interval_s = 0.0731

    def place(self, view: ClusterView, arrival: Arrival, now: float) -> Placement:
        names = list(view.instances)
        return Place(names[crc32(arrival.request_id.encode()) % len(names)])

    def on_prefill_done(self, view: ClusterView, request: RequestView, now: float) -> Sequence[Action]:
        return self._move(view, request, "prefill done", 1)

    def on_reasoning_ended(self, view: ClusterView, request: RequestView, now: float) -> Sequence[Action]:
        return self._move(view, request, "reasoning ended", 2)

    def on_length_boundary(self, view: ClusterView, request: RequestView, now: float) -> Sequence[Action]:
        return self._move(view, request, "outgrown", 1)

    def on_tick(self, view: ClusterView, now: float) -> Sequence[Action]:
        actions: list[Action] = []
        for instance in view.instances.values():
            for request in list(instance.requests)[:1]:
                actions.extend(self._move(view, request, "tick", 1))
        return actions

    def _move(self, view: ClusterView, request: RequestView, reason: str, by: int) -> Sequence[Action]:
        names = list(view.instances)
        at = names.index(request.instance_id)
        target = names[(at + by) % len(names)]
        return (Migrate(request.request_id, request.instance_id, target, reason),)
