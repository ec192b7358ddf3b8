"""Arrival: which instance gets a request."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from scheduler_svc.metrics import SchedulerMetrics
from tailrace.actions import Refuse
from tailrace.control.arrivals import Incoming
from tailrace.control.live import LiveControl
from tailrace.control.runner import Moment


@dataclass(frozen=True, slots=True)
class Decision:
    """`instance_id` is empty exactly when `refusal` is not. `seconds` is what deciding took."""

    instance_id: str
    policy: str
    refusal: str
    seconds: float
    # Of the request, that the instance is known to hold, what is to come included.
    cached_tokens: int = 0
    # The instance that has the KV to be fetched, its worker's address, and how many tokens it has.
    pull_from: str = ""
    pull_address: str = ""
    pull_tokens: int = 0


class Placer:
    """Times and counts placements."""

    def __init__(self, control: LiveControl, metrics: SchedulerMetrics) -> None:
        self._control = control
        self._metrics = metrics

    def place(self, incoming: Incoming) -> Decision:
        """Decide, and count the placement in. Waits for no I/O: works on the last known state."""
        began_s = time.perf_counter()
        policy = self._control.active.name
        arrival, placement = self._control.arrived(incoming, Moment(time.monotonic(), time.time()))
        seconds = time.perf_counter() - began_s
        if isinstance(placement, Refuse):
            self._metrics.refusals.inc()
            return Decision("", policy, placement.reason or "refused", seconds)
        self._metrics.placements.labels(policy, placement.instance_id).inc()
        cached = arrival.found_tokens(placement.instance_id, placement.pull_from)
        self._metrics.placed_tokens.inc(arrival.context_tokens)
        self._metrics.placed_cached_tokens.inc(cached)
        decision = Decision(placement.instance_id, policy, "", seconds, cached)
        holder = self._control.model.tracked(placement.pull_from) if placement.pull_from else None
        if holder is None:
            return decision
        self._metrics.pulls.inc()
        return replace(
            decision,
            pull_from=placement.pull_from,
            pull_address=holder.record.address,
            pull_tokens=arrival.told_tokens(placement.pull_from),
        )
