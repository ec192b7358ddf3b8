"""Call an etcd cluster, failing over when a member fails, stalls or has lost its leader."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, TypeVar

import grpc

from tailrace.address import Endpoint
from tailrace.security.renewed_channel import CLOSE_WHEN_IDLE, RenewedChannel
from tailrace.security.transport import PLAIN, Transport
from tailrace.service.pings import ping_options
from tailrace.service.tasks import cancel, task_error
from tailrace.store.etcd_api import (
    LEASE_KEEP_ALIVE,
    RANGE,
    REQUIRE_LEADER,
    Method,
    Reply,
    Request,
    prefix_end,
)
from tailrace.telemetry.incidents import unreadable
from tailrace.v1 import etcd_pb2

log = logging.getLogger(__name__)


class Listing(NamedTuple):
    """All values under a prefix, in key order, as of the revision that the header tells."""

    values: dict[bytes, bytes]
    header: etcd_pb2.ResponseHeader
    # Keys whose values are too large to be read.
    skipped: frozenset[bytes]


class StoreUnavailable(Exception):
    """etcd did not answer in time. What was last read from it presumably still holds.

    A write that ends with this may have been carried out.
    """


class LeaseExpired(StoreUnavailable):
    """The lease for a value has expired."""


# Deadline of a call with all of its attempts.
_DEADLINE_S: Final = 3.0
# After this long without an answer (or a share of the deadline, with many members), a request is also sent to
# the next member, and the first answer counts.
_HEDGE_S: Final = 1.0
# Pause between two rounds through all members, while a member is alive but the cluster has no leader yet.
_ROUND_S: Final = 0.2
# If no member can be reached, the call continues for this long, so that gRPC tries to connect once more.
_UNREACHABLE_S: Final = 1.25

# Keys of one page of a listing, which usually have some 800 bytes each; and the largest message that is read.
# A page that is larger is asked for again with fewer keys.
_PAGE_KEYS: Final = 1_000
_MESSAGE_BYTES: Final = 16 << 20
_TOO_LARGE: Final = "larger than max"
# Largest listing: 300,000 instances, and what a process can hold.
_LISTING_BYTES: Final = 256 << 20

_CHANNEL_OPTIONS: Final[tuple[tuple[str, str | int], ...]] = (
    ("grpc.max_receive_message_length", _MESSAGE_BYTES),
    # A name with several addresses stands for several members: calls use the next that answers.
    ("grpc.lb_policy_name", "round_robin"),
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
    # etcd rejects pings more often than every 5 s, or without an open call.
    *ping_options(6.0, 3.0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Timeout of one connection attempt.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    CLOSE_WHEN_IDLE,
)

# Statuses about the member or the way to it. Any other status is etcd's answer.
_MEMBER_FAILED: Final = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.DATA_LOSS,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
)

_Result = TypeVar("_Result")

# Engines seed Python's default generator identically in all workers.
_random = random.SystemRandom()


class Rejected(Exception):
    """etcd answered with an error that every other member would give as well."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        hint = "; compact, defragment, disarm the alarm" if "space exceeded" in details else ""
        super().__init__(f"{code.name}: {details}{hint}")
        self.code = code


class StreamEnded(Exception):
    """The member ended a stream, or sent something unexpected on it."""


@dataclass(slots=True, eq=False)
class Member:
    """One endpoint and its channel."""

    endpoint: Endpoint
    channel: RenewedChannel
    # Whether it has failed since its last answer.
    failed: bool = False

    async def unary(self, method: Method[Request, Reply], request: Request, timeout_s: float) -> Reply:
        """Make one call. Raise AioRpcError, or StreamEnded if the reply cannot be decoded."""
        call = self.channel.get().unary_unary(
            method.path, request_serializer=method.encode, response_deserializer=method.decode
        )
        # grpc.aio gives None for what it cannot decode.
        reply: Reply | None = await call(request, timeout=timeout_s, metadata=REQUIRE_LEADER)
        if reply is None:
            raise StreamEnded("its reply cannot be decoded")
        return reply

    def stream(
        self, method: Method[Request, Reply], timeout_s: float | None = None
    ) -> grpc.aio.StreamStreamCall[Request, Reply]:
        """Open one bidirectional stream, which the caller has to cancel."""
        call = self.channel.get().stream_stream(
            method.path, request_serializer=method.encode, response_deserializer=method.decode
        )
        return call(timeout=timeout_s, metadata=REQUIRE_LEADER)


@dataclass(frozen=True, slots=True)
class EtcdReply(Generic[Reply]):
    """A reply. `attempts` above 1: the request was sent before, and may have been carried out then."""

    reply: Reply
    attempts: int


class EtcdClient:
    """Make calls that end within three seconds, starting with the member that answered last.

    Retries repeat the request unchanged, so callers must make writes safe to repeat.
    """

    def __init__(self, endpoints: Sequence[Endpoint], transport: Transport = PLAIN) -> None:
        def channel(target: str) -> RenewedChannel:
            return RenewedChannel(
                lambda: transport.etcd_channel(target, _CHANNEL_OPTIONS), lambda: transport.version
            )

        # In random order, to spread the fleet over etcd's members.
        chosen = _random.sample(endpoints, len(endpoints))
        self._members = [Member(endpoint, channel(endpoint.target)) for endpoint in chosen]

    async def close(self) -> None:
        """Close the channels; pending calls end with StoreUnavailable."""
        await asyncio.gather(*(member.channel.close() for member in self._members))

    @property
    def preferred(self) -> Member:
        """Return the member to call first."""
        return self._members[0]

    def demote(self, member: Member, reason: str) -> None:
        """Move a member that failed or is silent to the end of the order."""
        self._members.remove(member)
        self._members.append(member)
        if not member.failed:
            member.failed = True
            log.warning("etcd member %s failed: %s", member.endpoint, reason)

    def mark_answering(self, member: Member) -> None:
        """Record that a member answered."""
        if member.failed:
            member.failed = False
            log.info("etcd member %s responds", member.endpoint)

    async def call(self, method: Method[Request, Reply], request: Request, action: str) -> EtcdReply[Reply]:
        """Call one member after the other. `action` names the call in errors.

        Raise StoreUnavailable if none answered in time, Rejected if etcd refuses.
        """
        return await self._failover(lambda member, left_s: member.unary(method, request, left_s), action)

    async def keep_alive(self, lease: int) -> int:
        """Renew a lease; return the seconds that it has now, 0 if it has expired. Raise StoreUnavailable."""

        async def attempt(member: Member, left_s: float) -> etcd_pb2.LeaseKeepAliveResponse:
            stream = member.stream(LEASE_KEEP_ALIVE, left_s)
            try:
                await stream.write(etcd_pb2.LeaseKeepAliveRequest(ID=lease))
                reply = await stream.read()
            finally:
                stream.cancel()
            if not isinstance(reply, etcd_pb2.LeaseKeepAliveResponse):
                raise StreamEnded("it ended the stream")
            return reply

        answer = await self._failover(attempt, f"renew lease {lease:x}")
        return int(answer.reply.TTL)

    async def header(self) -> etcd_pb2.ResponseHeader:
        """Return the current cluster id and revision by a linearizable read. Raise StoreUnavailable."""
        request = etcd_pb2.RangeRequest(key=b"/tailrace", count_only=True)
        return (await self.call(RANGE, request, "read the revision")).reply.header

    async def list_prefix(self, prefix: bytes, action: str) -> Listing:
        """Return all values under a prefix as of one revision.

        Raise StoreUnavailable also if there is too much under it, or Rejected.
        """
        values: dict[bytes, bytes] = {}
        skipped: set[bytes] = set()
        first: etcd_pb2.ResponseHeader | None = None
        request = etcd_pb2.RangeRequest(key=prefix, range_end=prefix_end(prefix), limit=_PAGE_KEYS)
        size = 0
        while True:
            try:
                reply = (await self.call(RANGE, request, action)).reply
            except Rejected as error:
                if not (_is_too_large(error) and await self._shorten(request, action, skipped)):
                    raise
                continue
            if first is None:
                first = reply.header
                # The following pages show the same state.
                request.revision = first.revision
            for kv in reply.kvs:
                values[kv.key] = kv.value
                size += len(kv.key) + len(kv.value)
            if size > _LISTING_BYTES:
                raise StoreUnavailable(
                    f"etcd: {action}: there are more than {_LISTING_BYTES >> 20} MiB under {prefix!r}; "
                    "delete what does not belong there"
                )
            if not reply.more:
                return Listing(values, first, frozenset(skipped))
            request.key = reply.kvs[-1].key + b"\0"
            request.limit = min(_PAGE_KEYS, 2 * request.limit)

    async def _shorten(self, request: etcd_pb2.RangeRequest, action: str, skipped: set[bytes]) -> bool:
        """Make a page that is too large smaller, or skip its only key; return False if it is empty."""
        if request.limit > 1:
            request.limit //= 2
            return True
        key = etcd_pb2.RangeRequest()
        key.CopyFrom(request)
        key.keys_only = True
        reply = (await self.call(RANGE, key, action)).reply
        if not reply.kvs:
            return False
        unreadable("value in etcd", repr(reply.kvs[0].key), f"it has more than {_MESSAGE_BYTES} bytes")
        skipped.add(reply.kvs[0].key)
        request.key = reply.kvs[0].key + b"\0"
        return True

    async def _failover(
        self, attempt: Callable[[Member, float], Awaitable[_Result]], action: str
    ) -> EtcdReply[_Result]:
        call = _Call(self, list(self._members), attempt)
        try:
            return await call.run()
        except _NoAnswer as error:
            raise StoreUnavailable(f"etcd: {action}: {error}") from error.__cause__


class _NoAnswer(Exception):
    """No member answered; the message says what each did."""


class _Call(Generic[_Result]):
    """The attempts of one call."""

    def __init__(
        self,
        client: EtcdClient,
        members: list[Member],
        attempt: Callable[[Member, float], Awaitable[_Result]],
    ) -> None:
        self._client = client
        self._members = members
        self._attempt = attempt
        self._pending: dict[asyncio.Task[_Result], Member] = {}
        self._next_member = 0
        # Failures in this round, and whether one of them came from a member that is alive.
        self._failed = 0
        self._alive = False
        self._reasons: dict[Member, str] = {}
        self._cause: BaseException | None = None

    async def run(self) -> EtcdReply[_Result]:
        """Run until an answer or the deadline, or until no member can be reached."""
        begin_s = time.monotonic()
        deadline_s = begin_s + _DEADLINE_S
        hedge_s = min(_HEDGE_S, _DEADLINE_S / len(self._members))
        attempts, due_s = 0, begin_s
        try:
            while (left_s := deadline_s - time.monotonic()) > 0:
                if time.monotonic() >= due_s:
                    self._begin(left_s)
                    attempts += 1
                    due_s = time.monotonic() + hedge_s
                for task in await self._finished(min(due_s, deadline_s)):
                    member = self._pending.pop(task)
                    if self._succeeded(task, member):
                        return EtcdReply(task.result(), attempts)
                    due_s = time.monotonic()
                if self._failed >= len(self._members):
                    hopeless = time.monotonic() - begin_s > _UNREACHABLE_S and not self._alive
                    if hopeless and not self._pending:
                        break
                    self._failed, self._alive = 0, False
                    due_s = time.monotonic() + _random.uniform(0.5, 1.0) * _ROUND_S
            for member in self._pending.values():
                self._reasons[member] = "no answer in time"
                self._client.demote(member, "no answer in time")
            raise _NoAnswer(self._reasons_text()) from self._cause
        finally:
            # It has this call in its frames.
            self._cause = None
            await cancel(*self._pending)
            for task in self._pending:
                # Of an attempt that another one has overtaken nobody wants to know how it failed.
                task_error(task)

    def _begin(self, left_s: float) -> None:
        """Start an attempt at the next idle member; if all are busy, at the next one in order again."""
        busy = set(self._pending.values())
        count = len(self._members)
        order = [(self._next_member + step) % count for step in range(count)]
        position = next((position for position in order if self._members[position] not in busy), order[0])
        self._next_member = position + 1
        member = self._members[position]

        async def ask() -> _Result:
            return await self._attempt(member, left_s)

        self._pending[asyncio.create_task(ask(), name=f"etcd {member.endpoint}")] = member

    async def _finished(self, until_s: float) -> list[asyncio.Task[_Result]]:
        wait_s = max(0.0, until_s - time.monotonic())
        if not self._pending:
            await asyncio.sleep(wait_s)
            return []
        done, _ = await asyncio.wait(self._pending, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        return list(done)

    def _succeeded(self, task: asyncio.Task[_Result], member: Member) -> bool:
        """Process a finished attempt. Raise Rejected, and errors that are not etcd failures."""
        # gRPC cancels pending calls when the channel is closed.
        error = StreamEnded("the channel was closed") if task.cancelled() else task.exception()
        if error is None:
            # Members that were called before and are still silent are slower than this one by at least a
            # hedge.
            for slow in self._pending.values():
                self._client.demote(slow, "slow to answer")
            self._client.mark_answering(member)
            return True
        if not isinstance(error, (grpc.aio.AioRpcError, *CALL_FAILURES)):
            try:
                raise error
            finally:
                del error, task
        if isinstance(error, grpc.aio.AioRpcError) and _is_answer(error):
            raise Rejected(error.code(), error.details() or "") from error
        reason = short_error(error)
        self._cause = error
        self._failed += 1
        # A member's own errors begin so; others are gRPC's about a member that cannot be reached.
        self._alive = self._alive or "etcdserver:" in reason
        self._reasons[member] = reason
        self._client.demote(member, reason)
        return False

    def _reasons_text(self) -> str:
        return "; ".join(f"{member.endpoint}: {reason}" for member, reason in self._reasons.items())


def _is_answer(error: grpc.aio.AioRpcError) -> bool:
    """Return whether every member would give this answer."""
    # A member's quota alarm applies to the whole cluster, and a reply is equally large from each.
    details = error.details() or ""
    return error.code() not in _MEMBER_FAILED or "space exceeded" in details or _TOO_LARGE in details


def _is_too_large(error: Rejected) -> bool:
    return error.code is grpc.StatusCode.RESOURCE_EXHAUSTED and _TOO_LARGE in str(error)


# How a call or stream ends other than by a status: the channel was closed, or the stream was over already.
CALL_FAILURES: Final = (StreamEnded, TimeoutError, grpc.aio.UsageError, asyncio.InvalidStateError)


def short_error(error: BaseException) -> str:
    """Format an error in a few words."""
    if isinstance(error, grpc.aio.AioRpcError):
        # The end of gRPC's message about a connection is the cause.
        reason = (error.details() or "").rpartition("last error: ")[2].removeprefix("UNKNOWN: ")
        return f"{error.code().name} {reason}"
    return str(error) or type(error).__name__
