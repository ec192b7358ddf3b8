"""Real services with simulated engines on that etcd, and streams through them.

Two schedulers, a monitor, a migration service, one process of workers, and a front end without an API server.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc

from simulator.request import SimRequest
from tailrace.service.tasks import cancel
from tailrace.v1 import admin_pb2, admin_pb2_grpc, types_pb2
from tests.harness.engine_core_load import LoadGenerator
from tests.harness.loaded_fleet import Workers, loaded_fleet

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
    settings = {"speed": _SPEED, "kv_blocks": 20_000, "max_model_len": _MAX_TOKENS}
    settings["reasoning_mean_tokens"] = 0
    async with loaded_fleet(
        folder / "fleet",
        Workers(WORKERS, settings),
        max_tokens=_MAX_TOKENS,
        reasons=False,
        schedulers=2,
        endpoints=endpoints,
    ) as loaded:
        yield Fleet(loaded.load, loaded.admins)
