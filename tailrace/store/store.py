"""Access to etcd: leases, reads, writes, compare-and-swap and watches under one cluster's prefix.

The one module that knows the etcd client (`etcd3aio`). Its service classes are used on a channel of our own,
because the client's `Etcd3Client` takes IPv4 addresses alone and leaves gRPC's reconnect back-off at two
minutes, and its keep-alive has no deadline.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import grpc
from etcd3aio import EtcdError, prefix_range_end
from etcd3aio.kv import KVService
from etcd3aio.lease import LeaseService
from etcd3aio.watch import WatchService

from tailrace.store.errors import StoreUnavailable as StoreUnavailable
from tailrace.store.registration import TOMBSTONES, Registration

log = logging.getLogger(__name__)

_DEADLINE_S: Final = 3.0
_CONNECT_DEADLINE_S: Final = 15.0
_RETRY_S: Final = 0.25
_MAX_RETRY_S: Final = 1.0
_EVENT_DELETE: Final = 1
# How a call to etcd fails; gRPC's streams raise InvalidStateError once they are over.
_FAILURES: Final = (
    EtcdError,
    TimeoutError,
    grpc.aio.AioRpcError,
    grpc.aio.UsageError,
    asyncio.InvalidStateError,
)
_CHANNEL_OPTIONS: Final = (
    ("grpc.lb_policy_name", "round_robin"),
    # etcd refuses pings that come more often than every 5 s, or with no call open.
    ("grpc.keepalive_time_ms", 6_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # How long one attempt to connect may take.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)


class Store:
    """One cluster's part of etcd. Keys are relative to `/tailrace/<cluster>/`; every call has a deadline."""

    def __init__(self, channel: grpc.aio.Channel, cluster: str) -> None:
        self._channel = channel
        self._prefix = f"/tailrace/{cluster}/"
        self._kv = KVService(channel)
        self._leases = LeaseService(channel)
        self._watches = WatchService(
            channel, reconnect_backoff_seconds=_RETRY_S, max_reconnect_backoff_seconds=_MAX_RETRY_S
        )
        self._registrations: set[Registration] = set()

    @classmethod
    async def connect(cls, endpoints: Sequence[str], cluster: str) -> Store:
        """A store whose etcd has answered. Waits some seconds for an etcd that is just starting.

        Raises StoreUnavailable; ValueError when a name is not an endpoint or a cluster name.
        """
        if not cluster or "/" in cluster:
            raise ValueError(f"cluster name {cluster!r}: must not be empty nor contain '/'")
        channel = grpc.aio.insecure_channel(await _target(endpoints), options=_CHANNEL_OPTIONS)
        store = cls(channel, cluster)
        give_up_s = time.monotonic() + _CONNECT_DEADLINE_S
        while True:
            try:
                await store.get("config")
                return store
            except StoreUnavailable as error:
                if time.monotonic() > give_up_s:
                    await channel.close()
                    raise StoreUnavailable(f"no etcd at {', '.join(endpoints)}: {error}") from error
                await asyncio.sleep(_RETRY_S)
            except BaseException:
                await channel.close()
                raise

    async def close(self) -> None:
        """Withdraw every registration and close the connection."""
        await asyncio.gather(*(r.withdraw() for r in list(self._registrations)), return_exceptions=True)
        await self._channel.close()

    # ---- values

    async def get(self, key: str) -> bytes | None:
        """The value, or None when there is none."""
        with _unavailable("get", key):
            reply = await self._kv.get(self._prefix + key, timeout=_DEADLINE_S)
        return bytes(reply.kvs[0].value) if reply.kvs else None

    async def get_prefix(self, prefix: str) -> dict[str, bytes]:
        """Every key (relative, whole) that begins with the prefix, in key order."""
        mapping, _ = await self._list(prefix)
        return mapping

    async def put(self, key: str, value: bytes) -> None:
        """Set a value that stays until it is deleted."""
        with _unavailable("put", key):
            await self._kv.put(self._prefix + key, value, timeout=_DEADLINE_S)

    async def delete(self, key: str) -> None:
        """Delete a value; nothing happens when there is none."""
        with _unavailable("delete", key):
            await self._kv.delete(self._prefix + key, timeout=_DEADLINE_S)

    async def compare_and_swap(self, key: str, expected: bytes | None, value: bytes) -> bool:
        """Set a value if the present one is `expected` (None: there is none). False: it was not."""
        return await self._swap(key, expected, self._kv.txn_op_put(self._prefix + key, value))

    async def compare_and_delete(self, key: str, expected: bytes) -> bool:
        """Delete a value if it is `expected`. False: it was not."""
        return await self._swap(key, expected, self._kv.txn_op_delete(self._prefix + key))

    async def _swap(self, key: str, expected: bytes | None, operation: object) -> bool:
        with _unavailable("compare and swap", key):
            reply = await self._kv.txn(
                [self._is(key, expected)], [operation], timeout=_DEADLINE_S, max_attempts=1
            )
        return bool(reply.succeeded)

    def _is(self, key: str, expected: bytes | None) -> object:
        if expected is None:
            return self._kv.txn_compare_create_revision(self._prefix + key, 0)
        return self._kv.txn_compare_value(self._prefix + key, expected)

    async def _list(self, prefix: str) -> tuple[dict[str, bytes], int]:
        """The mapping and the revision at which it held."""
        start = self._prefix + prefix
        with _unavailable("list", prefix):
            reply = await self._kv.get(start, range_end=prefix_range_end(start), timeout=_DEADLINE_S)
        return {self._relative(kv.key): bytes(kv.value) for kv in reply.kvs}, int(reply.header.revision)

    def _relative(self, key: bytes) -> str:
        return key.decode(errors="replace")[len(self._prefix) :]

    # ---- watches

    async def watch_prefix(self, prefix: str) -> AsyncGenerator[dict[str, bytes]]:
        """The whole mapping under the prefix: at once, then after each change, until the caller stops.

        While etcd is away nothing comes. Once it is back (even with a compacted history, or without its data)
        the mapping is read anew, so what happened meanwhile shows as one change.
        """
        last: dict[str, bytes] | None = None
        while True:
            changes = self._follow(prefix)
            try:
                async for mapping in changes:
                    if mapping != last:
                        last = mapping
                        yield dict(mapping)
            except (StoreUnavailable, *_FAILURES) as error:
                log.debug("watch of %r ended: %s", prefix, error)
            finally:
                await changes.aclose()
            await asyncio.sleep(_RETRY_S)

    async def _follow(self, prefix: str) -> AsyncGenerator[dict[str, bytes]]:
        """One watch. It is opened before the listing, so nothing falls between and no history is needed."""
        start = self._prefix + prefix
        current: dict[str, bytes] = {}
        listed_at: int | None = None
        stream = self._watches.watch(start, prefix_range_end(start))
        try:
            async for reply in stream:
                # A second `created` is the client's own reconnect, which trusts etcd to have kept history.
                if reply.canceled or reply.compact_revision or (reply.created and listed_at is not None):
                    return
                if reply.created:
                    current, listed_at = await self._list(prefix)
                    yield dict(current)
                    continue
                for event in reply.events:
                    if listed_at is not None and event.kv.mod_revision <= listed_at:
                        continue
                    key = self._relative(event.kv.key)
                    if event.type == _EVENT_DELETE:
                        current.pop(key, None)
                    else:
                        current[key] = bytes(event.kv.value)
                if reply.events:
                    yield dict(current)
        finally:
            await stream.aclose()

    # ---- leases

    async def register(self, key: str, value: bytes, ttl_s: float = 10.0) -> Registration:
        """Keep a value in etcd while this process lives; see Registration. Raises StoreUnavailable."""
        registration = Registration(self, key, value, ttl_s)
        await registration.start()
        self._registrations.add(registration)
        registration.on_withdrawn(self._registrations.discard)
        return registration

    async def grant_lease(self, ttl_s: float) -> int:
        """A new lease; its id."""
        with _unavailable("grant lease", ""):
            reply = await self._leases.grant(max(1, round(ttl_s)), timeout=_DEADLINE_S)
        return int(reply.ID)

    async def renew_lease(self, lease: int) -> bool:
        """Give the lease its whole time again. False: it has expired."""
        with _unavailable("renew lease", str(lease)):
            stream = self._leases.keep_alive(lease)
            try:
                async with asyncio.timeout(_DEADLINE_S):
                    reply = await stream.read()
            finally:
                stream.cancel()
            if reply is grpc.aio.EOF:
                raise TimeoutError("etcd closed the stream")
        return int(reply.TTL) > 0

    async def revoke_lease(self, lease: int) -> None:
        """End a lease and delete what hangs on it; nothing happens when it has expired."""
        with _unavailable("revoke lease", str(lease)):
            try:
                await self._leases.revoke(lease, timeout=_DEADLINE_S)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.NOT_FOUND:
                    raise

    async def put_leased(self, key: str, value: bytes, lease: int) -> None:
        """Set a value that goes with the lease, and take back the word that its owner withdrew it."""
        operations = [
            self._kv.txn_op_put(self._prefix + key, value, lease=lease),
            self._kv.txn_op_delete(f"{self._prefix}{TOMBSTONES}{key}"),
        ]
        with _unavailable("put", key):
            await self._kv.txn([], operations, timeout=_DEADLINE_S)

    async def create_leased(self, key: str, value: bytes, lease: int) -> bool:
        """Set a value that goes with the lease, if there is none. False: there is one."""
        operation = self._kv.txn_op_put(self._prefix + key, value, lease=lease)
        return await self._swap(key, None, operation)

    async def withdraw(self, key: str, value: bytes, ttl_s: float) -> None:
        """Delete a registered value that is `value` and say for some seconds that its owner took it away."""
        lease = await self.grant_lease(ttl_s)
        operations = [
            self._kv.txn_op_delete(self._prefix + key),
            self._kv.txn_op_put(f"{self._prefix}{TOMBSTONES}{key}", value, lease=lease),
        ]
        with _unavailable("withdraw", key):
            await self._kv.txn([self._is(key, value)], operations, timeout=_DEADLINE_S)


@contextmanager
def _unavailable(what: str, key: str) -> Iterator[None]:
    """Turn the client's errors into StoreUnavailable."""
    try:
        yield
    except _FAILURES as error:
        raise StoreUnavailable(f"etcd: {what} {key}: {_short(error)}".replace(" :", ":")) from error


def _short(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name} {error.details()}"
    return str(error) or "no answer in time"


async def _target(endpoints: Sequence[str]) -> str:
    """One endpoint stays a name, so that a changed address is found; several become addresses."""
    for endpoint in endpoints:
        host, colon, port = endpoint.rpartition(":")
        if not colon or not host or not port.isdigit():
            raise ValueError(f"etcd endpoint {endpoint!r}: HOST:PORT expected")
    if not endpoints:
        raise ValueError("no etcd endpoint given")
    if len(endpoints) == 1:
        return f"dns:///{endpoints[0]}"
    return "ipv4:" + ",".join([await _resolve(endpoint) for endpoint in endpoints])


async def _resolve(endpoint: str) -> str:
    host, _, port = endpoint.rpartition(":")
    try:
        ipaddress.IPv4Address(host)
        return endpoint
    except ipaddress.AddressValueError:
        pass
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, int(port), family=2)
    except OSError as error:
        raise StoreUnavailable(f"etcd endpoint {endpoint!r}: {error}") from error
    return f"{found[0][4][0]}:{port}"
