"""Migrate random requests, so that there are always migrations for faults to hit; and track where requests
are."""

from __future__ import annotations

import asyncio
import collections
import random
from collections.abc import Collection
from typing import Final

import grpc

from tailrace.service.tasks import cancel
from tailrace.v1 import admin_pb2, admin_pb2_grpc, types_pb2
from tests.chaos.cluster import Cluster
from tests.chaos.schedule import Tier

_PERIOD_S: Final = 0.2
_LIST_TIMEOUT_S: Final = 1.0
_MOVE_S: Final = 60.0
_MAX_CONCURRENT: Final = 4


class Mover:
    """Migrates requests of one cluster. Its actions depend on timing, not on the seed alone."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self._cluster = cluster
        self._rng = random.Random(f"{seed}/mover")
        self._requests: list[admin_pb2.RequestInfo] = []
        self.outcomes: collections.Counter[str] = collections.Counter()

    def requests_on(self, instances: Collection[str]) -> list[str]:
        """Return the IDs of the requests on these instances, as a scheduler last reported."""
        return [each.request_id for each in self._requests if each.instance_id in instances]

    async def run(self) -> None:
        """Migrate requests until cancelled."""
        moves: set[asyncio.Task[None]] = set()
        channels = [
            self._cluster.admin_stub(scheduler) for scheduler in self._cluster.in_tier(Tier.SCHEDULER)
        ]
        try:
            while True:
                await asyncio.sleep(_PERIOD_S)
                stub = await self._list_requests([stub for _, stub in channels])
                if stub is None or not self._requests or len(moves) >= _MAX_CONCURRENT:
                    continue
                task = asyncio.create_task(self._move(stub, self._rng.choice(self._requests).request_id))
                moves.add(task)
                task.add_done_callback(moves.discard)
        finally:
            await cancel(*moves)
            for channel, _ in channels:
                await channel.close()

    async def _list_requests(
        self, stubs: list[admin_pb2_grpc.AdminAsyncStub]
    ) -> admin_pb2_grpc.AdminAsyncStub | None:
        for scheduler, stub in zip(self._cluster.in_tier(Tier.SCHEDULER), stubs, strict=True):
            if not scheduler.healthy:
                continue
            try:
                reply = await stub.ListRequests(admin_pb2.ListRequestsRequest(), timeout=_LIST_TIMEOUT_S)
            except grpc.aio.AioRpcError:
                continue
            self._requests = list(reply.requests)
            return stub
        return None

    async def _move(self, stub: admin_pb2_grpc.AdminAsyncStub, request_id: str) -> None:
        target = self._rng.choice(self._cluster.instances)
        request = admin_pb2.AdminMigrateRequest(
            request_id=request_id, target_instance_id=target, reason="chaos"
        )
        state = types_pb2.MIGRATION_STATE_UNSPECIFIED
        try:
            async for update in stub.Migrate(request, timeout=_MOVE_S):
                state = update.state
        except grpc.aio.AioRpcError as error:
            self.outcomes["refused" if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED else "late"] += 1
            return
        name = types_pb2.MigrationState.Name(state).removeprefix("MIGRATION_STATE_").lower()
        self.outcomes[name] += 1
