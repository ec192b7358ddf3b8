"""Real services with simulated engines, as processes: etcd, monitor, migration service, scheduler, one
process of workers, and a front end without an API server."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.live.shape import REPORT_S, FleetShape
from tailrace.cluster import Pool
from tailrace.local.plan import PartSpec, Plan, Tier
from tailrace.local.ports import LOOPBACK, free_ports
from tailrace.local.progress import Step
from tailrace.local.start import Starter
from tailrace.local.state import RunFolder
from tailrace.service.etcd import etcd_command
from tailrace.v1 import admin_pb2, admin_pb2_grpc, migration_pb2, types_pb2
from tests.harness.engine_core_load import LoadGenerator
from tests.harness.usage import descendants

_CALL_S: Final = 10.0
_SETTLE_S: Final = 60.0
_POLL_S: Final = 0.05
_NEUTRAL: Final = "round_robin"
_POOLS: Final = {pool: getattr(types_pb2, f"POOL_{pool.name}") for pool in Pool}


class NoProgress:
    """A progress display that shows nothing."""

    def __enter__(self) -> NoProgress:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing."""

    def show(self, name: str, step: Step) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class LiveFleet:
    """A running fleet."""

    shape: FleetShape
    load: LoadGenerator
    admin: admin_pb2_grpc.AdminAsyncStub
    # HOST:PORT of the monitor, and of each part's metrics by the part's name.
    monitor: str
    metrics: Mapping[str, str]
    pids: Mapping[str, Sequence[int]]

    async def set_policy(self, name: str, pooled: bool) -> None:
        """Reset the fleet and select this policy: no stages; the initial pools if `pooled`, otherwise
        none."""
        # The previous policy must not change pools and stages while they are reset.
        await self._set_policy(_NEUTRAL)
        await self.admin.SetStages(admin_pb2.SetStagesRequest(), timeout=_CALL_S)
        pools = self.shape.pools() if pooled else {}
        for instance in self.shape.names:
            pool = pools.get(instance)
            number = types_pb2.POOL_UNSPECIFIED if pool is None else _POOLS[pool]
            request = admin_pb2.SetPoolRequest(instance_id=instance, pool=number)
            await self.admin.SetPool(request, timeout=_CALL_S)
        await self._set_policy(name)

    async def _set_policy(self, name: str) -> None:
        await self.admin.SetPolicy(admin_pb2.SetPolicyRequest(name=name), timeout=_CALL_S)
        async with asyncio.timeout(_SETTLE_S):
            while await self._active_policy() != name:  # noqa: ASYNC110 - the scheduler is polled
                await asyncio.sleep(_POLL_S)

    async def _active_policy(self) -> str:
        reply = await self.admin.ListPolicies(admin_pb2.ListPoliciesRequest(), timeout=_CALL_S)
        return next((policy.name for policy in reply.policies if policy.active), "")

    async def wait_idle(self) -> None:
        """Wait until the scheduler sees every worker, with a fresh report and without requests. Raise
        TimeoutError if it does not in time."""
        async with asyncio.timeout(_SETTLE_S):
            while not await self._idle():  # noqa: ASYNC110 - as above
                await asyncio.sleep(_POLL_S)

    async def _idle(self) -> bool:
        reply = await self.admin.ListInstances(admin_pb2.ListInstancesRequest(), timeout=_CALL_S)
        return len(reply.instances) == self.shape.workers and all(
            info.state == types_pb2.INSTANCE_STATE_ACTIVE
            and info.report_age_s < 2 * REPORT_S
            and not info.running
            and not info.waiting
            for info in reply.instances
        )

    async def migrations(self, since_s: float) -> list[migration_pb2.MigrationRecord]:
        """Return at most the last 1,000 migrations opened since then (seconds since the epoch)."""
        reply = await self.admin.ListMigrations(migration_pb2.ListMigrationsRequest(), timeout=_CALL_S)
        return [m for m in reply.migrations if m.opened_s >= since_s]

    async def scrape(self, part: str) -> list[Metric]:
        """Return a part's current metrics."""

        def read() -> list[Metric]:
            with urllib.request.urlopen(f"http://{self.metrics[part]}/metrics", timeout=_CALL_S) as reply:
                return list(text_string_to_metric_families(reply.read().decode()))

        return await asyncio.to_thread(read)


@asynccontextmanager
async def live_fleet(shape: FleetShape) -> AsyncIterator[LiveFleet]:
    """Run a fleet for the block. Raise PartFailed or TimeoutError if it does not start."""
    async with AsyncExitStack() as stack:
        folder = RunFolder(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tailrace-live-"))))
        stack.enter_context(folder.locked())
        folder.data.mkdir()
        sockets = folder.path / "front"
        sockets.mkdir()
        load = await stack.enter_async_context(LoadGenerator(sockets, shape.max_tokens, shape.reasons))
        plan, metrics = _plan(shape, folder, sockets)
        starter = Starter(plan, folder, NoProgress(), cores=2)
        state = await starter.run(None, "simulated")
        stack.callback(starter.stop)
        await load.ready()
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(plan.admin))
        stub = admin_pb2_grpc.AdminStub(channel)
        monitor = next(part.address for part in plan.parts if part.name == "monitor")
        pids = {part.name: descendants(part.identity.pid) for part in state.parts}
        fleet = LiveFleet(shape, load, stub, monitor, metrics, pids)
        await fleet.wait_idle()
        yield fleet


def _plan(shape: FleetShape, folder: RunFolder, sockets: Path) -> tuple[Plan, dict[str, str]]:
    """Return the processes, and the address of each one's metrics."""
    etcd_port, http_port, *ports = free_ports(12)
    etcd = f"{LOOPBACK}:{etcd_port}"
    addresses = iter([f"{LOOPBACK}:{port}" for port in ports])
    metrics: dict[str, str] = {}

    def service(kind: str, name: str, tier: Tier, *arguments: str) -> PartSpec:
        listen, metrics[kind] = next(addresses), next(addresses)
        command = [sys.executable, "-m", "tailrace", "serve", kind, "--etcd", etcd, "--listen", listen]
        return PartSpec(kind, tier, [*command, "--metrics", metrics[kind], "--id", name, *arguments], listen)

    engine = [f"--engine-arg={name}={json.dumps(value)}" for name, value in shape.engine_arguments().items()]
    worker = ["--engine", "simulated", "--intra", "policy", "--count", str(shape.workers)]
    worker += ["--report-interval", str(REPORT_S), *engine]
    front = ["--front", "none", "--ipc", str(sockets), "--http", f"{LOOPBACK}:{http_port}"]
    monitor = service("monitor", "monitor", Tier.CONTROL)
    scheduler = service("scheduler", "scheduler", Tier.CONTROL)
    parts = [
        PartSpec("etcd", Tier.ETCD, etcd_command(folder.data / "etcd", etcd_port), etcd),
        monitor,
        service("migration", "migration", Tier.CONTROL),
        scheduler,
        service("worker", shape.names[0], Tier.WORKER, *worker),
        service("frontend", "frontend", Tier.FRONTEND, *front),
    ]
    return Plan(parts, {}, scheduler.address, "", etcd), metrics
