"""Real services with simulated engines on that etcd, and streams through them.

Two schedulers, a monitor, a migration service, one process of workers, and a front end without an API server.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc

from benchmarks.live.fleet import NoProgress
from simulator.request import SimRequest
from tailrace.local.plan import PartSpec, Plan, Tier
from tailrace.local.ports import LOOPBACK, free_ports
from tailrace.local.start import Starter
from tailrace.local.state import RunFolder
from tailrace.service.tasks import cancel
from tailrace.v1 import admin_pb2, admin_pb2_grpc, types_pb2
from tests.harness.engine_core_load import LoadGenerator

WORKERS: Final = 4
_MAX_TOKENS: Final = 8_000
# Long streams, from the start, and short ones at regular intervals. A token takes about 20 ms.
LONG: Final = 20
_LONG_TOKENS_A_S: Final = 45
_SHORT_EVERY_S: Final = 0.5
_SHORT_TOKENS: Final = 20
_SPEED: Final = 0.35
_CALL_S: Final = 5.0
_POLL_S: Final = 0.25
_PATIENCE_S: Final = 60.0


@dataclass(slots=True)
class Streams:
    """Results of a replay. Times in seconds."""

    streams: int = 0
    # Every token arrived once, and the engine ended the stream.
    whole: int = 0
    gap_max_s: float = 0.0
    ttft_max_s: float = 0.0
    # Polls of the fleet; and those in which an instance was not active, or no scheduler replied.
    looks: int = 0
    looks_not_active: int = 0


class Fleet:
    """A running fleet."""

    def __init__(self, load: LoadGenerator, admins: Sequence[str]) -> None:
        self._load = load
        self._admins = admins
        self._replays = 0

    async def streams(self, seconds: float) -> Streams:
        """Run long streams for about this many seconds, with short ones throughout."""
        self._replays += 1
        tokens = int(seconds * _LONG_TOKENS_A_S)
        requests = [SimRequest(f"long-{n}", 0.02 * n, 32, 0, tokens) for n in range(LONG)]
        shorts = int(seconds / _SHORT_EVERY_S)
        requests += [
            SimRequest(f"short-{n}", 0.5 + n * _SHORT_EVERY_S, 32, 0, _SHORT_TOKENS) for n in range(shorts)
        ]
        found = Streams(streams=len(requests))
        polling = asyncio.create_task(self._poll_fleet(found))
        try:
            ended = await self._load.replay(f"r{self._replays}-", requests, _PATIENCE_S, lambda number: None)
        finally:
            await cancel(polling)
        found.whole = sum(stream.complete for stream in ended)
        found.gap_max_s = max(stream.gap_max_s for stream in ended)
        found.ttft_max_s = max(stream.ttft_s if stream.ttft_s is not None else 999.0 for stream in ended)
        return found

    async def _poll_fleet(self, found: Streams) -> None:
        async with AsyncExitStack() as stack:
            stubs = [
                admin_pb2_grpc.AdminStub(await stack.enter_async_context(grpc.aio.insecure_channel(address)))
                for address in self._admins
            ]
            while True:
                await asyncio.sleep(_POLL_S)
                for stub in stubs:
                    found.looks += 1
                    try:
                        reply = await stub.ListInstances(admin_pb2.ListInstancesRequest(), timeout=_CALL_S)
                    except grpc.aio.AioRpcError:
                        found.looks_not_active += 1
                        continue
                    active = [i for i in reply.instances if i.state == types_pb2.INSTANCE_STATE_ACTIVE]
                    found.looks_not_active += len(active) != WORKERS


@asynccontextmanager
async def fleet(endpoints: Sequence[str], folder: Path) -> AsyncIterator[Fleet]:
    """Run the fleet for the block. Raise PartFailed or TimeoutError if it does not start."""
    async with AsyncExitStack() as stack:
        run = RunFolder(folder / "fleet")
        stack.enter_context(run.locked())
        run.data.mkdir()
        sockets = run.path / "front"
        sockets.mkdir()
        load = await stack.enter_async_context(LoadGenerator(sockets, _MAX_TOKENS, False))
        plan = _plan(",".join(endpoints), sockets)
        starter = Starter(plan, run, NoProgress(), cores=2)
        await starter.run(None, "simulated")
        stack.callback(starter.stop)
        await load.ready()
        admins = [part.address for part in plan.parts if part.name.startswith("scheduler")]
        yield Fleet(load, admins)


def _plan(etcd: str, sockets: Path) -> Plan:
    http, *ports = free_ports(13)
    member_addresses = iter([f"{LOOPBACK}:{port}" for port in ports])

    def service(kind: str, name: str, tier: Tier, *arguments: str) -> PartSpec:
        listen = next(member_addresses)
        command = [sys.executable, "-m", "tailrace", "serve", kind, "--etcd", etcd, "--listen", listen]
        command += ["--metrics", next(member_addresses), "--id", name]
        members = [f"worker-{n}" for n in range(WORKERS)] if tier is Tier.WORKER else []
        return PartSpec(name, tier, [*command, *arguments], listen, members=members)

    settings = {"speed": _SPEED, "kv_blocks": 20_000, "max_model_len": _MAX_TOKENS}
    settings["reasoning_mean_tokens"] = 0
    engine = [f"--engine-arg={name}={json.dumps(value)}" for name, value in settings.items()]
    worker = ["--engine", "simulated", "--count", str(WORKERS), *engine]
    front = ["--front", "none", "--ipc", str(sockets), "--http", f"{LOOPBACK}:{http}"]
    first = service("scheduler", "scheduler-0", Tier.CONTROL)
    parts = [
        first,
        service("scheduler", "scheduler-1", Tier.CONTROL),
        service("monitor", "monitor", Tier.CONTROL),
        service("migration", "migration", Tier.CONTROL),
        service("worker", "worker-0", Tier.WORKER, *worker),
        service("frontend", "frontend", Tier.FRONTEND, *front),
    ]
    return Plan(parts, {}, first.address, "", etcd)
