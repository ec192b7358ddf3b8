"""Ask the schedulers where requests go, over one stream to each scheduler."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

import grpc

from tailrace.members import Members
from tailrace.security.roles import Role
from tailrace.service.channels import Channels, format_error, preferred
from tailrace.service.reachability import Reachability
from tailrace.service.tasks import cancel, run_once
from tailrace.v1 import scheduler_pb2, scheduler_pb2_grpc

log = logging.getLogger(__name__)

# Of a message and its reply.
_DEADLINE_S: Final = 1.0
# Requests per message. A scheduler decides on all of them before it does anything else, which takes some
# 50 ms for a full batch; smaller batches would make a burst of a thousand wait for many messages.
_BATCH_MAX: Final = 512

_PendingReply = asyncio.Future[scheduler_pb2.PlaceReply | None]


class PlacementClient:
    """Send placement requests to the schedulers, one message at a time; requests that arrive meanwhile share
    the next one.

    A message costs both ends time whatever it carries, which in a burst is most of the cost of placing.
    """

    def __init__(
        self, members: Members, channels: Channels, reachability: Reachability | None = None
    ) -> None:
        """Keep `reachability` (a new one by default) and close it with this client."""
        self._members = members
        self._channels = channels
        # A scheduler that did not answer is probed in the background, so that only one message waits for its
        # deadline.
        self._reachability = (
            reachability if reachability is not None else Reachability(channels, Role.SCHEDULER)
        )
        self._waiting: list[tuple[scheduler_pb2.PlaceRequest, _PendingReply]] = []
        self._task: asyncio.Task[None] | None = None
        # By address.
        self._streams: dict[str, _PlacementStream] = {}

    async def place(self, request: scheduler_pb2.PlaceRequest) -> scheduler_pb2.PlaceReply | None:
        """Return the reply of the first scheduler that answers, the leader first; None if none does."""
        pending: _PendingReply = asyncio.get_running_loop().create_future()
        self._waiting.append((request, pending))
        if self._task is None:
            self._task = run_once("placements", self._run)
        return await pending

    async def close(self) -> None:
        """Stop; requests that still wait get None."""
        if self._task is not None:
            await cancel(self._task)
        for address in list(self._streams):
            self._drop_stream(address)
        await self._reachability.close()

    async def _run(self) -> None:
        batch: list[tuple[scheduler_pb2.PlaceRequest, _PendingReply]] = []
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[:_BATCH_MAX], self._waiting[_BATCH_MAX:]
                replies = await self._ask([request for request, _ in batch])
                for (_, pending), reply in zip(batch, replies, strict=True):
                    _resolve(pending, reply)
        finally:
            # No await between the last check of the queue and this: a request that arrives later starts a new
            # task.
            self._task = None
            for _, pending in (*batch, *self._waiting):
                _resolve(pending, None)
            self._waiting.clear()

    async def _ask(
        self, requests: list[scheduler_pb2.PlaceRequest]
    ) -> list[scheduler_pb2.PlaceReply] | list[None]:
        message = scheduler_pb2.PlaceManyRequest(requests=requests)
        for address in self._schedulers():
            try:
                reply = await self._ask_one(address, message)
            except (grpc.aio.AioRpcError, _StreamEnded, TimeoutError) as error:
                log.warning("scheduler at %s: %s", address, format_error(error))
            else:
                if len(reply.replies) == len(requests):
                    self._reachability.succeeded(address)
                    return list(reply.replies)
                log.error("scheduler at %s: %d replies to %d", address, len(reply.replies), len(requests))
            self._drop_stream(address)
            self._reachability.failed(address)
        return [None] * len(requests)

    async def _ask_one(
        self, address: str, message: scheduler_pb2.PlaceManyRequest
    ) -> scheduler_pb2.PlaceManyReply:
        """Return a scheduler's reply. Raise grpc.aio.AioRpcError, _StreamEnded or TimeoutError."""
        channel = self._channels.get(address, Role.SCHEDULER)
        stream = self._streams.get(address)
        # A new certificate means a new channel.
        if stream is not None and stream.channel is channel:
            try:
                return await stream.ask(message)
            except (grpc.aio.AioRpcError, _StreamEnded) as error:
                # It may have ended since the last message, for instance because the scheduler restarted.
                log.debug("scheduler at %s: %s; opening another stream", address, format_error(error))
        try:
            return await self._open_stream(address, channel).ask(message)
        except grpc.aio.AioRpcError as error:
            # The call ended while the message was written, and grpc.aio has lost its status.
            if error.code() is not grpc.StatusCode.INTERNAL:
                raise
        return await self._open_stream(address, channel).ask(message)

    def _open_stream(self, address: str, channel: grpc.aio.Channel) -> _PlacementStream:
        self._drop_stream(address)
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        stream = self._streams[address] = _PlacementStream(channel, stub)
        return stream

    def _drop_stream(self, address: str) -> None:
        stream = self._streams.pop(address, None)
        if stream is not None:
            stream.close()

    def _schedulers(self) -> list[str]:
        """Return addresses of the schedulers that are worth asking now, and forget those that are gone."""
        addresses = [record.address for record in preferred(self._members, "scheduler")]
        self._reachability.keep_only(addresses)
        for address in self._streams.keys() - set(addresses):
            self._drop_stream(address)
        return [address for address in addresses if self._reachability.usable(address)]


class _StreamEnded(Exception):
    """The scheduler has ended the stream without an error."""

    def __init__(self) -> None:
        super().__init__("the stream has ended")


class _PlacementStream:
    """One Place call, with one message at a time under way."""

    def __init__(self, channel: grpc.aio.Channel, stub: scheduler_pb2_grpc.SchedulerAsyncStub) -> None:
        self.channel = channel
        self._call = stub.Place()

    async def ask(self, message: scheduler_pb2.PlaceManyRequest) -> scheduler_pb2.PlaceManyReply:
        """Return the reply to a message.

        Raise grpc.aio.AioRpcError or _StreamEnded if the stream has broken, TimeoutError if there is no reply
        in time. After any of them, and after a cancellation, the stream cannot be used again.
        """
        if self._call.done():
            raise _StreamEnded
        try:
            async with asyncio.timeout(_DEADLINE_S):
                await self._call.write(message)
                reply = await self._call.read()
        except asyncio.InvalidStateError:
            raise _StreamEnded from None
        except TimeoutError:
            raise TimeoutError(f"no reply within {_DEADLINE_S:g} s") from None
        if not isinstance(reply, scheduler_pb2.PlaceManyReply):
            raise _StreamEnded
        return reply

    def close(self) -> None:
        """Cancel the call."""
        self._call.cancel()


def _resolve(pending: _PendingReply, reply: scheduler_pb2.PlaceReply | None) -> None:
    """Set the result unless it is set already or the caller was cancelled."""
    if not pending.done():
        pending.set_result(reply)
