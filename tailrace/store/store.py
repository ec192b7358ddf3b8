"""Access to etcd: leases, reads, writes, compare-and-swap and watches under one cluster's prefix."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

import grpc

from tailrace.address import parse_endpoints
from tailrace.security.transport import PLAIN, Transport
from tailrace.store.client import Answer, EtcdClient, Rejected
from tailrace.store.client import LeaseExpired as LeaseExpired
from tailrace.store.client import StoreUnavailable as StoreUnavailable
from tailrace.store.etcd_api import (
    LEASE_GRANT,
    LEASE_REVOKE,
    RANGE,
    TXN,
    Method,
    Reply,
    Request,
    delete_op,
    get_op,
    prefix_end,
    put_op,
    unchanged,
)
from tailrace.store.watch import PrefixWatch
from tailrace.v1 import etcd_pb2

TOMBSTONES: Final = "withdrawn/"
"""`withdrawn/<key>` holds, for a while, the value that its owner took away: how a reader tells a withdrawal
from a process that died, both of which only delete the key."""

_CONNECT_S: Final = 15.0
_RETRY_S: Final = 0.25
# How often a write is tried that loses to others' writes of the same key.
_ATTEMPTS: Final = 8

_Present = etcd_pb2.KeyValue | None


@dataclass(frozen=True, slots=True)
class Held:
    """A value, and the lease that it hangs on (0: none)."""

    value: bytes
    lease: int


class Store:
    """One cluster's part of etcd. Keys are relative to `/tailrace/<cluster>/`.

    Every method ends within seconds, whatever etcd does, and raises StoreUnavailable when no member answered.
    Requests go on at another member when one fails or stalls. A write may then be sent twice; it carries the
    revision at which its key was read, so that it is carried out once at most, and never late.
    """

    def __init__(self, client: EtcdClient, cluster: str) -> None:
        self._client = client
        self._prefix = f"/tailrace/{cluster}/"
        self._before_close: list[Callable[[], Awaitable[None]]] = []

    @classmethod
    async def connect(cls, endpoints: Sequence[str], cluster: str, transport: Transport = PLAIN) -> Store:
        """A store of which one etcd member has answered. Waits some seconds for an etcd that is just
        starting.

        Raises StoreUnavailable; ValueError when a name is not an endpoint or a cluster name.
        """
        if not cluster or "/" in cluster:
            raise ValueError(f"cluster name {cluster!r}: must not be empty nor contain '/'")
        client = EtcdClient(parse_endpoints(endpoints), transport)
        store = cls(client, cluster)
        give_up_s = time.monotonic() + _CONNECT_S
        while True:
            try:
                await store.get("config")
                return store
            except StoreUnavailable as error:
                if time.monotonic() > give_up_s:
                    await client.close()
                    raise StoreUnavailable(f"no etcd at {', '.join(endpoints)}: {error}") from error
                await asyncio.sleep(_RETRY_S)
            except BaseException:
                await client.close()
                raise

    async def close(self) -> None:
        """Await what is to be done before, all at once, and close the connections."""
        await asyncio.gather(*(action() for action in list(self._before_close)), return_exceptions=True)
        await self._client.close()

    def before_close(self, action: Callable[[], Awaitable[None]]) -> None:
        """Have `close` await this first; it may call forget_close."""
        self._before_close.append(action)

    def forget_close(self, action: Callable[[], Awaitable[None]]) -> None:
        """It has been done already; nothing happens for one that `close` does not know."""
        if action in self._before_close:
            self._before_close.remove(action)

    # ---- values

    async def get(self, key: str) -> bytes | None:
        """The value, or None when there is none."""
        present = await self._read(key)
        return None if present is None else present.value

    async def get_prefix(self, prefix: str) -> dict[str, bytes]:
        """Every key (relative, whole) that begins with the prefix, in key order."""
        start = self._key(prefix)
        request = etcd_pb2.RangeRequest(key=start, range_end=prefix_end(start))
        reply = (await self._call(RANGE, request, f"list {prefix}")).reply
        return {self._relative(kv.key): kv.value for kv in reply.kvs}

    async def put(self, key: str, value: bytes) -> None:
        """Set a value that stays until it is deleted."""
        await self._write(key, [put_op(self._key(key), value)], f"put {key}", _any, _is_value(value))

    async def delete(self, key: str) -> None:
        """Delete a value; nothing happens when there is none."""
        await self._write(
            key, [delete_op(self._key(key))], f"delete {key}", lambda present: present is not None, _deleted
        )

    async def compare_and_swap(self, key: str, expected: bytes | None, value: bytes) -> bool:
        """Set a value if the present one is `expected` (None: there is none). False: it was not.

        Where a reply was lost, True may also mean that somebody else put the very same value in its place:
        who must know apart writes values of its own. Raises StoreUnavailable also when a reply was lost and
        others have written since.
        """
        return await self._write(
            key,
            [put_op(self._key(key), value)],
            f"compare and swap {key}",
            _has_value(expected),
            _swapped(value),
        )

    async def compare_and_delete(self, key: str, expected: bytes) -> bool:
        """Delete a value if it is `expected`. False: it was not. Raises as compare_and_swap."""
        return await self._write(
            key, [delete_op(self._key(key))], f"compare and delete {key}", _has_value(expected), _deleted
        )

    async def delete_orphaned(self, keys: Sequence[str], owner: str) -> bool:
        """Delete values if there is none at `owner`. False: there is one."""
        names = [self._key(key) for key in keys]
        for _ in range(_ATTEMPTS):
            if await self._read(owner) is not None:
                return False
            compare = [unchanged(self._key(owner), None)]
            compare += [unchanged(self._key(key), await self._read(key)) for key in keys]
            request = etcd_pb2.TxnRequest(compare=compare, success=[delete_op(name) for name in names])
            if (await self._call(TXN, request, f"delete {', '.join(keys)}")).reply.succeeded:
                return True
        raise StoreUnavailable(f"etcd: delete {', '.join(keys)}: others keep changing them")

    # ---- watches

    async def watch_prefix(self, prefix: str) -> AsyncGenerator[dict[str, bytes]]:
        """The whole mapping under the prefix: at once, then after each change, until the caller stops.

        While etcd is away nothing comes. Once it is back (even with a compacted history, or without its data)
        the mapping is read anew, so what happened meanwhile shows as one change.
        """
        async with aclosing(PrefixWatch(self._client, self._key(prefix)).values()) as changes:
            async for values in changes:
                yield {self._relative(key): value for key, value in values.items()}

    # ---- leases

    async def grant_lease(self, ttl_s: float) -> int:
        """A new lease; its id."""
        # Chosen here, so that asking twice grants one. Not by `random`, which engines seed alike in all
        # workers.
        lease = secrets.randbits(62) + 1
        request = etcd_pb2.LeaseGrantRequest(ID=lease, TTL=max(1, round(ttl_s)))
        try:
            await self._client.call(LEASE_GRANT, request, "grant a lease")
        except Rejected as error:
            # It exists: an attempt that seemed lost was carried out.
            if error.code is not grpc.StatusCode.FAILED_PRECONDITION:
                raise StoreUnavailable(f"etcd: grant a lease: {error}") from error
        return lease

    async def renew_lease(self, lease: int) -> bool:
        """Give the lease its whole time again. False: it has expired."""
        try:
            return await self._client.keep_alive(lease) > 0
        except Rejected as error:
            if error.code is grpc.StatusCode.NOT_FOUND:
                return False
            raise StoreUnavailable(f"etcd: renew a lease: {error}") from error

    async def revoke_lease(self, lease: int) -> None:
        """End a lease and delete what hangs on it; nothing happens when it has expired."""
        try:
            await self._client.call(LEASE_REVOKE, etcd_pb2.LeaseRevokeRequest(ID=lease), "revoke a lease")
        except Rejected as error:
            if error.code is not grpc.StatusCode.NOT_FOUND:
                raise StoreUnavailable(f"etcd: revoke a lease: {error}") from error

    async def get_leased(self, key: str) -> Held | None:
        """The value with its lease, or None when there is none."""
        return _held(await self._read(key))

    async def put_leased(self, key: str, value: bytes, lease: int) -> None:
        """Set a value that goes with the lease, and take back the word that its owner withdrew it.

        Raises LeaseExpired.
        """
        operations = [put_op(self._key(key), value, lease), delete_op(self._key(TOMBSTONES + key))]
        await self._write(key, operations, f"put {key}", _any, _is_leased(value, lease))

    async def create_leased(self, key: str, value: bytes, lease: int) -> bool:
        """Set a value that goes with the lease, if there is none. True also when it is there already, with
        this very lease; False: there is another. Raises LeaseExpired."""
        return await self.swap_leased(key, None, value, lease)

    async def swap_leased(self, key: str, expected: Held | None, value: bytes, lease: int) -> bool:
        """The same if what is there is `expected`."""
        before = _holds(expected)
        operations = [put_op(self._key(key), value, lease)]
        if await self._write(key, operations, f"register {key}", before, _is_leased(value, lease)):
            return True
        return await self.get_leased(key) == Held(value, lease)

    async def withdraw(self, key: str, value: bytes, ttl_s: float) -> None:
        """Delete a registered value that is `value` and say for some seconds that its owner took it away."""
        lease = await self.grant_lease(ttl_s)
        operations = [delete_op(self._key(key)), put_op(self._key(TOMBSTONES + key), value, lease)]
        await self._write(key, operations, f"withdraw {key}", _has_value(value), _deleted)

    # ---- inside

    def _key(self, relative: str) -> bytes:
        return (self._prefix + relative).encode()

    def _relative(self, key: bytes) -> str:
        return key.decode(errors="replace")[len(self._prefix) :]

    async def _read(self, key: str) -> _Present:
        request = etcd_pb2.RangeRequest(key=self._key(key))
        reply = (await self._call(RANGE, request, f"get {key}")).reply
        return reply.kvs[0] if reply.kvs else None

    async def _write(
        self,
        key: str,
        operations: Sequence[etcd_pb2.RequestOp],
        what: str,
        accept: Callable[[_Present], bool],
        ours: Callable[[_Present, _Present], bool | None],
    ) -> bool:
        """Carry the operations out, once, if what is at the key is accepted; False: it is not.

        They hold only for the revision of the key that was read, and change it: of a request that was sent
        several times one at most is carried out, and one that arrives late does nothing. Where an attempt
        seemed lost and the key has changed, `ours(before, after)` tells whether it was carried out; None:
        that cannot be known any more, StoreUnavailable is raised.
        """
        name = self._key(key)
        for _ in range(_ATTEMPTS):
            before = await self._read(key)
            if not accept(before):
                return False
            request = etcd_pb2.TxnRequest(
                compare=[unchanged(name, before)], success=operations, failure=[get_op(name)]
            )
            answer = await self._call(TXN, request, what)
            if answer.reply.succeeded:
                return True
            if answer.attempts > 1:
                kvs = answer.reply.responses[0].response_range.kvs
                carried_out = ours(before, kvs[0] if kvs else None)
                if carried_out:
                    return True
                if carried_out is None:
                    raise StoreUnavailable(f"etcd: {what}: whether it was done is not known; changed since")
        raise StoreUnavailable(f"etcd: {what}: others keep changing it")

    async def _call(self, method: Method[Request, Reply], request: Request, what: str) -> Answer[Reply]:
        try:
            return await self._client.call(method, request, what)
        except Rejected as error:
            # Of what we send, only a lease may not be found.
            kind = LeaseExpired if error.code is grpc.StatusCode.NOT_FOUND else StoreUnavailable
            raise kind(f"etcd: {what}: {error}") from error


# What may be at a key before a write.


def _any(present: _Present) -> bool:
    return True


def _has_value(expected: bytes | None) -> Callable[[_Present], bool]:
    return lambda present: (None if present is None else present.value) == expected


def _holds(expected: Held | None) -> Callable[[_Present], bool]:
    return lambda present: _held(present) == expected


def _held(present: _Present) -> Held | None:
    return None if present is None else Held(present.value, present.lease)


# Whether what is at a key after a write with a lost attempt is that attempt's doing.


def _is_value(value: bytes) -> Callable[[_Present, _Present], bool]:
    """Of a write that may be repeated until its value is there."""
    return lambda before, after: after is not None and after.value == value


def _is_leased(value: bytes, lease: int) -> Callable[[_Present, _Present], bool]:
    """Nobody else knows the lease."""
    return lambda before, after: after is not None and (after.value, after.lease) == (value, lease)


def _swapped(value: bytes) -> Callable[[_Present, _Present], bool | None]:
    def ours(before: _Present, after: _Present) -> bool | None:
        if after is None or after.version != (1 if before is None else before.version + 1):
            return None
        if before is None:
            # A key that was created, deleted and created again looks no different.
            return True if after.value == value else None
        return after.value == value if before.create_revision == after.create_revision else None

    return ours


def _deleted(before: _Present, after: _Present) -> bool | None:
    if after is None:
        return True
    # Written anew after it was deleted: by whom it was deleted is not known.
    return False if before is not None and before.create_revision == after.create_revision else None
