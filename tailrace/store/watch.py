"""Watch the keys under a prefix, failing over between etcd members."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator
from typing import Final

import grpc

from tailrace.service.tasks import cancel
from tailrace.store.client import (
    CALL_FAILURES,
    EtcdClient,
    Member,
    Rejected,
    StoreUnavailable,
    StreamEnded,
    short_error,
)
from tailrace.store.etcd_api import WATCH, progress_request, watch_prefix_request
from tailrace.v1 import etcd_pb2

log = logging.getLogger(__name__)

# How often a watch is compared with the cluster, and how long its member may take to catch up. A member that
# is cut off or stalls is left within the sum of both and of one failover.
_CHECK_S: Final = 2.0
_CATCH_UP_S: Final = 3.0
_OPEN_S: Final = 2.0
_RETRY_S: Final = 0.25

_Stream = grpc.aio.StreamStreamCall[etcd_pb2.WatchRequest, etcd_pb2.WatchResponse]


class PrefixWatch:
    """Read all keys under a prefix and follow them, switching members when one falls silent or behind.

    etcd's watches are silent while nothing changes, and also while their member is cut off or stalls. So
    every two seconds the cluster's revision is read through whichever member answers, and the watch's own
    member must show within three that it has reached that revision.
    """

    def __init__(self, client: EtcdClient, prefix: bytes) -> None:
        self._client = client
        self._prefix = prefix
        self._values: dict[bytes, bytes] = {}
        # Keys whose values are too large to be read.
        self.skipped: frozenset[bytes] = frozenset()
        # Revisions of the last listing, of the last event and of the member's last message, and the cluster's
        # id. Events are compared with the listing only: before 3.5.8 etcd may report progress ahead of the
        # events before it.
        self._listed_revision = 0
        self._event_revision = 0
        self._revision = 0
        self._cluster_id = 0
        self._changed = asyncio.Event()
        self._progress = asyncio.Event()

    async def values(self) -> AsyncGenerator[tuple[dict[bytes, bytes], int]]:
        """Yield all values by key, and the revision of the last change that they contain: at once, then after
        each change.

        Changes between two yields are merged. While etcd cannot be reached nothing is yielded; once it is
        back (even with a compacted history, or without its data) everything is read again.
        """
        following = asyncio.create_task(self._follow(), name=f"watch of {self._prefix!r}")
        following.add_done_callback(lambda _: self._changed.set())
        shown: dict[bytes, bytes] | None = None
        shown_revision = 0
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                if following.done():
                    following.result()
                # A write of the value that is there already changes the revision alone.
                if self._values != shown or self._event_revision != shown_revision:
                    shown, shown_revision = dict(self._values), self._event_revision
                    yield dict(shown), shown_revision
        finally:
            following.cancel()
            await asyncio.wait([following])

    async def _follow(self) -> None:
        """Watch through one member after the other until cancelled."""
        rejected = ""
        while True:
            member = self._client.preferred
            try:
                await _first_ended(
                    asyncio.create_task(self._watch_member(member), name=f"watch {member.endpoint}")
                )
            except StoreUnavailable as error:
                log.debug("watch of %r: %s", self._prefix, error)
            except Rejected as error:
                # Said once: without the right to read the keys, each attempt ends so.
                if str(error) != rejected:
                    log.warning("watch of %r: %s", self._prefix, error)
                rejected = str(error)
            except (grpc.aio.AioRpcError, *CALL_FAILURES) as error:
                self._client.demote(member, f"watch: {short_error(error)}")
            await asyncio.sleep(_RETRY_S * random.uniform(0.5, 1.5))

    async def _watch_member(self, member: Member) -> None:
        """Run one watch until it ends or is found stale. Raise what ended it.

        It is opened before the values are read, so no change is missed and no history is needed.
        """
        stream = member.stream(WATCH)
        try:
            async with asyncio.timeout(_OPEN_S):
                await stream.write(watch_prefix_request(self._prefix))
                if not (await _read(stream)).created:
                    raise StreamEnded("it did not open the watch")
            await self._list()
            await _first_ended(
                asyncio.create_task(self._read_events(stream), name="watch events"),
                asyncio.create_task(self._check(stream), name="watch check"),
            )
        finally:
            stream.cancel()

    async def _list(self) -> None:
        self._values, header, self.skipped = await self._client.list_prefix(
            self._prefix, f"list {self._prefix.decode()}"
        )
        self._listed_revision = self._event_revision = self._revision = header.revision
        self._cluster_id = header.cluster_id
        self._changed.set()

    async def _read_events(self, stream: _Stream) -> None:
        """Apply events as long as the stream lasts."""
        while True:
            reply = await _read(stream)
            if reply.canceled or reply.compact_revision:
                raise StreamEnded(f"it ended the watch: {reply.cancel_reason or 'history was compacted'}")
            for event in reply.events:
                if event.kv.mod_revision <= self._listed_revision:
                    continue
                if event.kv.mod_revision < self._event_revision:
                    # Happens before 3.5.8 on a member that was behind and caught up by a snapshot.
                    raise StreamEnded("its revisions went backwards")
                self._event_revision = event.kv.mod_revision
                self.skipped -= {event.kv.key}
                if event.type == etcd_pb2.Event.DELETE:
                    self._values.pop(event.kv.key, None)
                else:
                    self._values[event.kv.key] = event.kv.value
            if reply.events:
                self._changed.set()
            self._revision = max(self._revision, reply.header.revision)
            self._progress.set()

    async def _check(self, stream: _Stream) -> None:
        """Compare the watch with the cluster until it fails. Raise StreamEnded."""
        while True:
            await asyncio.sleep(_CHECK_S)
            revision = self._revision
            try:
                now = await self._client.header()
            except StoreUnavailable:
                continue  # Without the cluster there is nothing newer to be seen.
            if now.cluster_id != self._cluster_id or now.revision < revision:
                raise StreamEnded("etcd's data was replaced")
            try:
                async with asyncio.timeout(_CATCH_UP_S):
                    # Before the request: its reply may have been processed by the time that `write` returns.
                    self._progress.clear()
                    await stream.write(progress_request())
                    await self._wait_for_revision(now.revision)
            except TimeoutError as error:
                raise StreamEnded(f"silent for {_CATCH_UP_S:.0f} s, or behind the others") from error

    async def _wait_for_revision(self, revision: int) -> None:
        # Wait for a reply to the request even if nothing has changed.
        await self._progress.wait()
        while self._revision < revision:
            self._progress.clear()
            await self._progress.wait()


async def _first_ended(*tasks: asyncio.Task[None]) -> None:
    """Wait until one task has ended; cancel the others.

    Raise what ended it; StreamEnded if gRPC cancelled it, as it does when the channel is closed.
    """
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        ended = [_error_of(task) for task in tasks if task.done()]
    finally:
        await cancel(*tasks)
    errors = [error for error in ended if error is not None]
    del tasks, ended
    if errors:
        raise errors.pop(0)


def _error_of(task: asyncio.Task[None]) -> BaseException | None:
    return StreamEnded("the channel was closed") if task.cancelled() else task.exception()


async def _read(stream: _Stream) -> etcd_pb2.WatchResponse:
    """Return the next message. Raise StreamEnded or AioRpcError."""
    reply = await stream.read()
    if not isinstance(reply, etcd_pb2.WatchResponse):
        raise StreamEnded("it ended the stream")
    return reply
