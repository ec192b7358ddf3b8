"""Asks workers for all that their prefix caches hold, where an update is missing."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Final

import grpc

from tailrace.control.reported_cluster import ReportedCluster
from tailrace.security.roles import Role
from tailrace.service.channels import Channels
from tailrace.v1 import cache_pb2, cache_pb2_grpc

log = logging.getLogger(__name__)

# Between two looks at who is to be asked.
_POLL_S: Final = 0.1
_DEADLINE_S: Final = 5.0
# Asked at a time: a listing of a large cache is half a megabyte.
_TOGETHER: Final = 8
# A worker that did not answer is not asked again for so long, give or take half.
_AGAIN_S: Final = 2.0


class CacheSync:
    """Only placements are the worse for what it does not get."""

    def __init__(self, state: ReportedCluster, channels: Channels) -> None:
        self._state = state
        self._channels = channels
        # Not before these times, of the loop's clock.
        self._not_before: dict[str, float] = {}

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(_POLL_S)

    async def look(self) -> None:
        """Ask those that are to be asked now."""
        wanted = self._state.cache.follower.wanted
        now_s = asyncio.get_running_loop().time()
        self._not_before = {name: at_s for name, at_s in self._not_before.items() if at_s > now_s}
        due = [name for name in wanted if name not in self._not_before][:_TOGETHER]
        if due:
            await asyncio.gather(*(self._ask(name) for name in due))

    async def _ask(self, instance_id: str) -> None:
        tracked = self._state.tracked(instance_id)
        if tracked is None:
            return
        stub = cache_pb2_grpc.CacheStub(self._channels.get(tracked.record.address, Role.WORKER))
        try:
            reply = await stub.ListBlocks(cache_pb2.ListCacheRequest(), timeout=_DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            log.info("cache of %s: %s", instance_id, error.code().name)
            again_s = _AGAIN_S * random.uniform(0.5, 1.5)
            self._not_before[instance_id] = asyncio.get_running_loop().time() + again_s
        else:
            self._state.cache_listed(instance_id, reply)
