"""The keys under a prefix as they change, whichever etcd member tells of it."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator
from typing import Final

import grpc

from tailrace.store.client import CALL_FAILURES, EtcdClient, Member, StoreUnavailable, StreamEnded, short
from tailrace.store.etcd_api import RANGE, WATCH, prefix_end, progress_request, watch_prefix_request
from tailrace.v1 import etcd_pb2

log = logging.getLogger(__name__)

# How often a watch is held against the cluster, and how long its member may take to have caught up. A member
# that is cut off or stands still is left within the sum of both and of one failover.
_CHECK_S: Final = 2.0
_CATCH_UP_S: Final = 3.0
_OPEN_S: Final = 2.0
_RETRY_S: Final = 0.25

_Stream = grpc.aio.StreamStreamCall[etcd_pb2.WatchRequest, etcd_pb2.WatchResponse]


class PrefixWatch:
    """Reads all keys under a prefix and follows them, at another member when one falls silent or behind.

    etcd's watches say nothing while nothing changes, and nothing either when their member is cut off or
    stands still. So every two seconds the cluster's revision is read, through whichever member answers, and
    the watch's own member must show within three that it has come so far.
    """

    def __init__(self, client: EtcdClient, prefix: bytes) -> None:
        self._client = client
        self._prefix = prefix
        self._values: dict[bytes, bytes] = {}
        # Revisions of the last listing and of the member's last word, and the cluster that counts them.
        # Events are held against the listing alone: before 3.5.8 etcd may tell its progress ahead of the
        # events before it.
        self._listed = 0
        self._last_event = 0
        self._seen = 0
        self._cluster_id = 0
        self._changed = asyncio.Event()
        self._progress = asyncio.Event()

    async def values(self) -> AsyncGenerator[dict[bytes, bytes]]:
        """All values by key: at once, then after each change, until the caller stops.

        Changes that come while the caller does not ask show as one. While etcd is away nothing comes; once it
        is back (even with a compacted history, or without its data) all is read anew.
        """
        following = asyncio.create_task(self._follow(), name=f"watch of {self._prefix!r}")
        following.add_done_callback(lambda _: self._changed.set())
        shown: dict[bytes, bytes] | None = None
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                if following.done():
                    following.result()
                if self._values != shown:
                    shown = dict(self._values)
                    yield dict(shown)
        finally:
            following.cancel()
            await asyncio.wait([following])

    async def _follow(self) -> None:
        """Until cancelled, through one member after the other."""
        while True:
            member = self._client.preferred
            try:
                await _ended(asyncio.create_task(self._through(member), name=f"watch {member.endpoint}"))
            except StoreUnavailable as error:
                log.debug("watch of %r: %s", self._prefix, error)
            except (grpc.aio.AioRpcError, *CALL_FAILURES) as error:
                self._client.demote(member, f"watch: {short(error)}")
            await asyncio.sleep(_RETRY_S * random.uniform(0.5, 1.5))

    async def _through(self, member: Member) -> None:
        """One watch, until it ends or is found stale. It is opened before the values are read, so nothing
        falls between, and no history is needed. Raises what ended it."""
        stream = member.stream(WATCH)
        try:
            async with asyncio.timeout(_OPEN_S):
                await stream.write(watch_prefix_request(self._prefix))
                if not (await _read(stream)).created:
                    raise StreamEnded("it did not open the watch")
            await self._list()
            await _ended(
                asyncio.create_task(self._take(stream), name="watch events"),
                asyncio.create_task(self._check(stream), name="watch check"),
            )
        finally:
            stream.cancel()

    async def _list(self) -> None:
        request = etcd_pb2.RangeRequest(key=self._prefix, range_end=prefix_end(self._prefix))
        reply = (await self._client.call(RANGE, request, f"list {self._prefix.decode()}")).reply
        self._values = {kv.key: kv.value for kv in reply.kvs}
        self._listed = self._last_event = self._seen = reply.header.revision
        self._cluster_id = reply.header.cluster_id
        self._changed.set()

    async def _take(self, stream: _Stream) -> None:
        """Take events in, for as long as the stream lasts."""
        while True:
            reply = await _read(stream)
            if reply.canceled or reply.compact_revision:
                raise StreamEnded(f"it ended the watch: {reply.cancel_reason or 'history was compacted'}")
            for event in reply.events:
                if event.kv.mod_revision <= self._listed:
                    continue
                if event.kv.mod_revision < self._last_event:
                    # Before 3.5.8, of a member that was behind and caught up by a snapshot.
                    raise StreamEnded("its events went back in time")
                self._last_event = event.kv.mod_revision
                if event.type == etcd_pb2.Event.DELETE:
                    self._values.pop(event.kv.key, None)
                else:
                    self._values[event.kv.key] = event.kv.value
            if reply.events:
                self._changed.set()
            self._seen = max(self._seen, reply.header.revision)
            self._progress.set()

    async def _check(self, stream: _Stream) -> None:
        """Hold the watch against the cluster until it fails. Raises StreamEnded."""
        while True:
            await asyncio.sleep(_CHECK_S)
            seen = self._seen
            try:
                now = await self._client.header()
            except StoreUnavailable:
                continue  # Without the cluster there is nothing newer to be seen.
            if now.cluster_id != self._cluster_id or now.revision < seen:
                raise StreamEnded("etcd's data was replaced")
            try:
                async with asyncio.timeout(_CATCH_UP_S):
                    # Before the request: its reply may have been taken in by the time that `write` returns.
                    self._progress.clear()
                    await stream.write(progress_request())
                    await self._reached(now.revision)
            except TimeoutError as error:
                raise StreamEnded(f"silent for {_CATCH_UP_S:.0f} s, or behind the others") from error

    async def _reached(self, revision: int) -> None:
        # A reply since the request is waited for even when nothing has changed.
        await self._progress.wait()
        while self._seen < revision:
            self._progress.clear()
            await self._progress.wait()


async def _ended(*tasks: asyncio.Task[None]) -> None:
    """Until one has ended; then end the others. Raises what ended it; StreamEnded when gRPC cancelled it, as
    it does when the channel is closed."""
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if task.cancelled():
                raise StreamEnded("the channel was closed")
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _read(stream: _Stream) -> etcd_pb2.WatchResponse:
    """The next message. Raises StreamEnded, AioRpcError."""
    reply = await stream.read()
    if not isinstance(reply, etcd_pb2.WatchResponse):
        raise StreamEnded("it ended the stream")
    return reply
