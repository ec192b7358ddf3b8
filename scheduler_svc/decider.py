"""Brings reports and ticks to the policy's decision points. Only the leader decides."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from tailrace.control.live import LiveControl
from tailrace.control.runner import Moment
from tailrace.v1 import monitor_pb2

# How soon a policy with another tick, set meanwhile, is noticed.
_POLL_S: Final = 1.0


class Decider:
    """The clock, and whether this scheduler leads."""

    def __init__(self, control: LiveControl, leading: asyncio.Event) -> None:
        self._control = control
        self._leading = leading

    def take(self, report: monitor_pb2.WorkerReport, now_s: float) -> None:
        """Apply a report and decide on what it tells."""
        self._control.reported(report, Moment(now_s, time.time()), deciding=self._leading.is_set())

    async def run_ticks(self) -> None:
        """Call on_tick as often as the policy wants, while leading; until cancelled."""
        ticked_s = time.monotonic()
        while True:
            if not self._leading.is_set():
                self._control.forget_ticks()
                await self._leading.wait()
            interval_s = self._control.active.policy.tick_interval_s
            if interval_s is None:
                await asyncio.sleep(_POLL_S)
                continue
            left_s = ticked_s + interval_s - time.monotonic()
            if left_s > 0:
                await asyncio.sleep(min(left_s, _POLL_S))
                continue
            ticked_s = time.monotonic()
            self.tick()

    def tick(self) -> None:
        """One tick."""
        self._control.tick(Moment(time.monotonic(), time.time()))
