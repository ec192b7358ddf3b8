"""Asks schedulers where requests go: one call at a time, and what comes meanwhile together in the next."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

import grpc

from frontend_svc.fleet import Members
from tailrace.security.roles import Role
from tailrace.service.channels import Channels
from tailrace.service.failure import failure
from tailrace.service.preferred import preferred
from tailrace.service.reachability import Reachability
from tailrace.v1 import scheduler_pb2, scheduler_pb2_grpc

log = logging.getLogger(__name__)

_DEADLINE_S: Final = 1.0
# Requests of one call. A scheduler decides on all of them before it does anything else, some 50 ms for so
# many; fewer would have a burst of a thousand wait for many calls in a row, each slow while all are busy.
_TOGETHER: Final = 512

_Answer = asyncio.Future[scheduler_pb2.PlaceReply | None]


class PlaceCalls:
    """A call costs both ends a millisecond, whatever it asks: in a burst, most of what placing takes."""

    def __init__(
        self, members: Members, channels: Channels, reachability: Reachability | None = None
    ) -> None:
        """`reachability`: its own when not given; closed with it."""
        self._members = members
        self._channels = channels
        # A scheduler that did not answer is probed in the background: its deadline is paid by one call only.
        self._reachability = (
            reachability if reachability is not None else Reachability(channels, Role.SCHEDULER)
        )
        self._waiting: list[tuple[scheduler_pb2.PlaceRequest, _Answer]] = []
        self._asking: asyncio.Task[None] | None = None

    async def ask(self, request: scheduler_pb2.PlaceRequest) -> scheduler_pb2.PlaceReply | None:
        """The reply of the first scheduler that answers, the leader before the others; None: none does."""
        answer: _Answer = asyncio.get_running_loop().create_future()
        self._waiting.append((request, answer))
        if self._asking is None:
            self._asking = asyncio.create_task(self._run(), name="place calls")
            self._asking.add_done_callback(_look)
        return await answer

    async def close(self) -> None:
        """Ask no more; who still waits hears that nobody answered."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait([self._asking])
        await self._reachability.close()

    async def _run(self) -> None:
        asked: list[tuple[scheduler_pb2.PlaceRequest, _Answer]] = []
        try:
            while self._waiting:
                asked, self._waiting = self._waiting[:_TOGETHER], self._waiting[_TOGETHER:]
                replies = await self._call([request for request, _ in asked])
                for (_, answer), reply in zip(asked, replies, strict=True):
                    _settle(answer, reply)
        finally:
            # In the same turn as the last look at who waits: whoever comes after begins anew.
            self._asking = None
            for _, answer in (*asked, *self._waiting):
                _settle(answer, None)
            self._waiting.clear()

    async def _call(
        self, requests: list[scheduler_pb2.PlaceRequest]
    ) -> list[scheduler_pb2.PlaceReply] | list[None]:
        for address in self._schedulers():
            stub = scheduler_pb2_grpc.SchedulerStub(self._channels.get(address, Role.SCHEDULER))
            try:
                reply = await stub.PlaceMany(
                    scheduler_pb2.PlaceManyRequest(requests=requests), timeout=_DEADLINE_S
                )
            except grpc.aio.AioRpcError as error:
                log.warning("scheduler at %s: %s", address, error.code().name)
            else:
                if len(reply.replies) == len(requests):
                    self._reachability.succeeded(address)
                    return list(reply.replies)
                log.error("scheduler at %s: %d replies to %d", address, len(reply.replies), len(requests))
            self._reachability.failed(address)
        return [None] * len(requests)

    def _schedulers(self) -> list[str]:
        """Addresses worth asking now."""
        addresses = [record.address for record in preferred(self._members, "scheduler")]
        self._reachability.keep_only(addresses)
        return [address for address in addresses if self._reachability.usable(address)]


def _settle(answer: _Answer, reply: scheduler_pb2.PlaceReply | None) -> None:
    """Unless it is settled, or who asked has gone."""
    if not answer.done():
        answer.set_result(reply)


def _look(task: asyncio.Task[None]) -> None:
    if (error := failure(task)) is not None:
        log.error("asking for placements failed", exc_info=error)
