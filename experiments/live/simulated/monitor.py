"""Follow the monitor during a replay: where requests are first seen, and the delay of its reports."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from tailrace.service.tasks import cancel
from tailrace.v1 import monitor_pb2
from tailrace.v1.monitor_pb2_grpc import MonitorStub


class MonitorSubscriber:
    """Consumes the monitor's deltas as the scheduler does."""

    def __init__(self) -> None:
        # Request ID -> instance where it was placed. A request that ends between two reports is never seen.
        self.first_seen: dict[str, str] = {}
        # Seconds from each phase event to its arrival here.
        self.delays_s: list[float] = []

    def add_delta(self, delta: monitor_pb2.StateDelta) -> None:
        """Process one delta."""
        now_s = time.time()
        for report in delta.reports:
            for event in report.phase_events:
                self.first_seen.setdefault(event.request_id, report.instance_id)
                if not delta.snapshot:
                    self.delays_s.append(now_s - event.time_s)
            for request_id in report.requests.request_ids:
                self.first_seen.setdefault(request_id, report.instance_id)


@asynccontextmanager
async def subscribed_to(monitor: str) -> AsyncIterator[MonitorSubscriber]:
    """Subscribe to the monitor at HOST:PORT for the block."""
    subscriber = MonitorSubscriber()
    async with grpc.aio.insecure_channel(monitor) as channel:
        call = MonitorStub(channel).Watch(monitor_pb2.WatchRequest(subscriber="live against simulated"))

        async def read() -> None:
            async for delta in call:
                subscriber.add_delta(delta)

        reader = asyncio.create_task(read(), name="watch")
        try:
            yield subscriber
        finally:
            await cancel(reader)
