"""What the monitor tells while a slice is replayed: where requests were first seen, and how late it tells."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from tailrace.v1 import monitor_pb2
from tailrace.v1.monitor_pb2_grpc import MonitorStub


class Watch:
    """Follows the monitor's deltas as the scheduler does."""

    def __init__(self) -> None:
        # Request id -> instance: where it was placed. One that ended within a report's time is never seen.
        self.first_seen: dict[str, str] = {}
        # Seconds from a phase event's time to its arrival here.
        self.delays_s: list[float] = []

    def take(self, delta: monitor_pb2.StateDelta) -> None:
        """One delta."""
        now_s = time.time()
        for report in delta.reports:
            for event in report.phase_events:
                self.first_seen.setdefault(event.request_id, report.instance_id)
                if not delta.snapshot:
                    self.delays_s.append(now_s - event.time_s)
            for request in report.requests:
                self.first_seen.setdefault(request.request_id, report.instance_id)


@asynccontextmanager
async def watching(monitor: str) -> AsyncIterator[Watch]:
    """Watch the monitor at HOST:PORT for the block."""
    watch = Watch()
    async with grpc.aio.insecure_channel(monitor) as channel:
        call = MonitorStub(channel).Watch(monitor_pb2.WatchRequest(subscriber="live against simulated"))

        async def read() -> None:
            async for delta in call:
                watch.take(delta)

        reading = asyncio.create_task(read(), name="watch")
        try:
            yield watch
        finally:
            reading.cancel()
            await asyncio.wait([reading])
