"""Heartbeats to every front end, and an ear for those that have fallen silent."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from tailrace.v1 import worker_pb2
from worker_agent.frontends import FrontEnds

HEARTBEAT_S: Final = 0.5
_HEARTBEAT: Final = worker_pb2.AttachDown(heartbeat=worker_pb2.Heartbeat())


async def beat(front_ends: FrontEnds, silence_s: float) -> None:
    """Beat until cancelled; cut front ends from which nothing came for `silence_s` seconds."""
    due_s = time.monotonic()
    while True:
        due_s += HEARTBEAT_S
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        now_s = time.monotonic()
        # For as long as this process did not run (stopped, or the machine slept), nobody could be heard.
        late_s = now_s - due_s
        due_s = now_s
        for front_end in front_ends:
            front_end.check(now_s, late_s, silence_s)
            if front_end.reads:
                front_end.send(_HEARTBEAT)
