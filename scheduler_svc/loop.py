"""The way of each decision: an event comes, it is applied to the model, the policy is asked about what it
shows, and its actions are carried out.

Read on with `LiveControl.handle` (tailrace/control/live.py), which tells all of them: `ReportedCluster.apply`
changes the model, `PolicyRunner` asks the policy through its guard, and `Actuator` carries out the actions.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from scheduler_svc.metrics import SchedulerMetrics
from tailrace.actions import Refuse
from tailrace.cluster import Arrival
from tailrace.control.events import Arrived, Reported, Ticked, TicksForgotten
from tailrace.control.live import LiveControl
from tailrace.v1 import monitor_pb2, scheduler_pb2

# How soon a newly set policy with another tick interval is noticed.
_POLL_S: Final = 1.0
# Shortest time between two ticks, whatever interval a policy declares.
_REST_S: Final = 0.001


class DecisionLoop:
    """Turn what comes to this scheduler into events: placements on every scheduler, and on the leader reports
    and ticks."""

    def __init__(
        self,
        control: LiveControl,
        leading: asyncio.Event,
        metrics: SchedulerMetrics,
        asked_in_vain: Callable[[str, float], None] = lambda model_key, now_s: None,
    ) -> None:
        """`leading` is set while this scheduler leads: only the leader decides. `asked_in_vain`: told of
        requests for which there is no instance, with the key of their model and the monotonic time."""
        self._control = control
        self._leading = leading
        self._metrics = metrics
        self._asked_in_vain = asked_in_vain

    def handle_report(self, report: monitor_pb2.WorkerReport, now_s: float) -> None:
        """Apply a report and decide on the changes that it shows."""
        self._control.handle(Reported(report, self._leading.is_set(), now_s, time.time()))

    def tick(self) -> None:
        """Run one tick now."""
        self._control.handle(Ticked(time.monotonic(), time.time()))

    def forget_ticks(self) -> None:
        """Drop the time of the last tick: another scheduler leads."""
        self._control.handle(TicksForgotten())

    async def run_ticks(self) -> None:
        """Call on_tick at the policy's interval while leading; run until cancelled.

        After a tick the loop is left to others for at least as long as the tick took.
        """
        ticked_s = rested_s = time.monotonic()
        while True:
            if not self._leading.is_set():
                self.forget_ticks()
                await self._leading.wait()
            interval_s = self._control.active.declared.tick_interval_s
            if interval_s is None:
                await asyncio.sleep(_POLL_S)
                continue
            left_s = max(ticked_s + interval_s, rested_s) - time.monotonic()
            if left_s > 0:
                await asyncio.sleep(min(left_s, _POLL_S))
                continue
            ticked_s = time.monotonic()
            self.tick()
            ended_s = time.monotonic()
            rested_s = ended_s + max(ended_s - ticked_s, _REST_S)

    def place(self, asked: Arrival) -> scheduler_pb2.PlaceReply:
        """Decide and enter the placement into the model, timed and counted. Does no I/O: works on the last
        known state."""
        began_s = time.perf_counter()
        policy = self._control.active.name
        arrival, placement = self._control.handle(Arrived(asked, time.monotonic(), time.time()))
        decided_us = (time.perf_counter() - began_s) * 1e6
        if isinstance(placement, Refuse):
            self._metrics.refused(asked.frontend_id, placement.final)
            if not placement.final:
                self._asked_in_vain(asked.model, time.monotonic())
            return scheduler_pb2.PlaceReply(
                policy=policy,
                refusal=placement.reason or "refused",
                final=placement.final,
                decided_us=decided_us,
            )
        cached = arrival.found_tokens(placement.instance_id, placement.pull_from)
        reply = scheduler_pb2.PlaceReply(
            instance_id=placement.instance_id, policy=policy, cached_tokens=cached, decided_us=decided_us
        )
        if self._control.active.declared.pacer:
            reply.pace_s = self._control.active.slo.reading_s
        holder = self._control.model.tracked(placement.pull_from) if placement.pull_from else None
        self._metrics.placed(
            policy, placement.instance_id, arrival.context_tokens, cached, holder is not None
        )
        if holder is not None:
            reply.pull_from_instance_id = placement.pull_from
            reply.pull_address = holder.record.address
            reply.pull_tokens = arrival.reported_tokens(placement.pull_from)
        return reply
