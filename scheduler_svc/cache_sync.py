"""Fetch the complete prefix cache contents of workers of which an incremental update is missing."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Final

import grpc

from tailrace.control.events import CacheListed
from tailrace.control.reported_cluster import ReportedCluster
from tailrace.security.roles import Role
from tailrace.service.channels import Channels, decoded
from tailrace.v1 import cache_pb2, cache_pb2_grpc

log = logging.getLogger(__name__)

# Seconds between two checks for instances to fetch.
_POLL_S: Final = 0.1
_DEADLINE_S: Final = 5.0
# Concurrent calls: a listing of a large cache is half a megabyte.
_PARALLEL_MAX: Final = 8
# Seconds before a worker that did not answer is called again, plus or minus half.
_RETRY_S: Final = 2.0


class CacheSync:
    """Resynchronise the cache index. Whatever it cannot fetch only makes placements less precise."""

    def __init__(self, state: ReportedCluster, channels: Channels) -> None:
        self._state = state
        self._channels = channels
        # Earliest time of the next call per instance, by the loop's clock.
        self._retry_at_s: dict[str, float] = {}

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            await self.run_once()
            await asyncio.sleep(_POLL_S)

    async def run_once(self) -> None:
        """Fetch the caches that are due now."""
        instance_ids = self._state.cache.follower.incomplete
        now_s = asyncio.get_running_loop().time()
        self._retry_at_s = {name: at_s for name, at_s in self._retry_at_s.items() if at_s > now_s}
        due = [name for name in instance_ids if name not in self._retry_at_s][:_PARALLEL_MAX]
        if due:
            await asyncio.gather(*(self._sync(name) for name in due))

    async def _sync(self, instance_id: str) -> None:
        tracked = self._state.tracked(instance_id)
        if tracked is None:
            return
        address = tracked.record.address
        stub = cache_pb2_grpc.CacheStub(self._channels.get(address, Role.WORKER))
        try:
            reply = decoded(await stub.ListBlocks(cache_pb2.ListCacheRequest(), timeout=_DEADLINE_S), address)
        except grpc.aio.AioRpcError as error:
            log.info("cache of %s: %s", instance_id, error.code().name)
            retry_s = _RETRY_S * random.uniform(0.5, 1.5)
            self._retry_at_s[instance_id] = asyncio.get_running_loop().time() + retry_s
        else:
            self._state.apply(CacheListed(instance_id, reply))
