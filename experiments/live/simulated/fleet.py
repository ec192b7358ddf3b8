"""The live side of a comparison: real services with simulated engines, reset before each replay."""

from __future__ import annotations

import asyncio
import tempfile
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import grpc
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from experiments.live.simulated.shape import REPORT_S, FleetShape
from tailrace.v1 import admin_pb2_grpc, migration_pb2, types_pb2
from tests.harness.controlled import POLL_S, ControlledFleet
from tests.harness.engine_core_load import LoadGenerator
from tests.harness.loaded_fleet import LoadedFleet, Workers, loaded_fleet
from tests.waiting import WAIT_S

_NEUTRAL: Final = "round_robin"


class LiveFleet(ControlledFleet):
    """A running fleet."""

    def __init__(self, shape: FleetShape, loaded: LoadedFleet, admin: admin_pb2_grpc.AdminAsyncStub) -> None:
        super().__init__(admin)
        self.shape = shape
        self._loaded = loaded

    @property
    def load(self) -> LoadGenerator:
        """The load generator."""
        return self._loaded.load

    @property
    def monitor(self) -> str:
        """HOST:PORT of the monitor."""
        return self._loaded.monitor

    @property
    def pids(self) -> Mapping[str, Sequence[int]]:
        """Process IDs by part."""
        return self._loaded.pids

    async def reset(self, policy: str, pooled: bool) -> None:
        """Reset the fleet and select this policy: no stages; the initial pools if `pooled`, otherwise
        none."""
        # The previous policy must not change pools and stages while they are reset.
        await self.set_policy(_NEUTRAL)
        await self.set_stages([])
        pools = self.shape.pools() if pooled else {}
        for instance in self.shape.names:
            await self.set_pool(instance, pools.get(instance))
        await self.set_policy(policy)

    async def wait_idle(self) -> None:
        """Wait until the scheduler sees every worker, with a fresh report and without requests. Raise
        TimeoutError if it does not in time."""
        async with asyncio.timeout(WAIT_S):
            while not await self._idle():  # noqa: ASYNC110 - the scheduler is polled
                await asyncio.sleep(POLL_S)

    async def _idle(self) -> bool:
        instances = (await self.instances()).values()
        return len(instances) == self.shape.workers and all(
            info.state == types_pb2.INSTANCE_STATE_ACTIVE
            and info.report_age_s < 2 * REPORT_S
            and not info.running
            and not info.waiting
            for info in instances
        )

    async def migrations_since(self, since_s: float) -> list[migration_pb2.MigrationRecord]:
        """Return the listed migrations that were opened since then (seconds since the epoch)."""
        return [m for m in await self.migrations() if m.opened_s >= since_s]

    async def scrape(self, part: str) -> list[Metric]:
        """Return a part's current metrics."""

        def read() -> list[Metric]:
            url = f"http://{self._loaded.metrics[part]}/metrics"
            with urllib.request.urlopen(url, timeout=WAIT_S) as reply:
                return list(text_string_to_metric_families(reply.read().decode()))

        return await asyncio.to_thread(read)


@asynccontextmanager
async def live_fleet(shape: FleetShape) -> AsyncIterator[LiveFleet]:
    """Run a fleet for the block. Raise PartFailed or TimeoutError if it does not start."""
    options = ["--intra", "policy", "--report-interval", str(REPORT_S)]
    workers = Workers(shape.workers, shape.engine_arguments(), options)
    with tempfile.TemporaryDirectory(prefix="tailrace-live-") as path:
        async with (
            loaded_fleet(Path(path), workers, max_tokens=shape.max_tokens, reasons=shape.reasons) as loaded,
            grpc.aio.insecure_channel(loaded.admins[0]) as channel,
        ):
            fleet = LiveFleet(shape, loaded, admin_pb2_grpc.AdminStub(channel))
            await fleet.wait_idle()
            yield fleet
