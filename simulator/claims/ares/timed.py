"""ARES with a stopwatch."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tailrace.actions import Action
from tailrace.cluster import ClusterView
from tailrace.policy.ares.policy import Ares


class TimedAres(Ares):
    """Decides as Ares does, and notes how long each tick took."""

    def __init__(self) -> None:
        super().__init__()
        self.tick_s: list[float] = []

    def on_tick(self, view: ClusterView, now: float) -> Sequence[Action]:
        """Algorithm 1, timed; the simulator makes the views of requests that it looks at meanwhile."""
        start = time.perf_counter()
        actions = super().on_tick(view, now)
        self.tick_s.append(time.perf_counter() - start)
        return actions
