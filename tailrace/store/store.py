"""Access to etcd: leases, reads, writes, compare-and-swap and watches under one cluster's prefix."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, NamedTuple

import grpc

from tailrace.address import parse_endpoints
from tailrace.security.transport import PLAIN, Transport
from tailrace.store.client import EtcdClient, EtcdReply, Rejected
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
    put_op,
    unchanged,
)
from tailrace.store.watch import PrefixWatch
from tailrace.telemetry.incidents import unreadable
from tailrace.v1 import etcd_pb2

TOMBSTONES: Final = "withdrawn/"
"""`withdrawn/<key>` holds, for a while, the value that its owner withdrew. It lets a reader tell a withdrawal
from the death of a process; both only delete the key."""

LONGEST_KEY: Final = 1_024
"""Longest key that is read, in characters."""

SWAPS_MAX: Final = 128
"""Values that can be swapped in one transaction: the operations that etcd allows in one by default."""

# Unreadable keys that are counted.
_UNNAMED: Final = 10_000
_CONNECT_S: Final = 15.0
_RETRY_S: Final = 0.25
# Attempts of a write that loses to other writes of the same key.
_ATTEMPTS: Final = 8

_Present = etcd_pb2.KeyValue | None


def clusters_below(prefix: str) -> str:
    """Return the prefix of the keys of clusters that belong to the one with this prefix, which ends in `/`:
    each has a name of its own after its name and a dot."""
    return prefix[:-1] + "."


@dataclass(frozen=True, slots=True)
class LeasedValue:
    """A value and the lease that it is attached to (0: none)."""

    value: bytes
    lease: int


class Swap(NamedTuple):
    """A value that is to replace another one. None: there is none."""

    expected: bytes | None
    value: bytes | None


class Snapshot(NamedTuple):
    """All values under a prefix by relative key."""

    values: dict[str, bytes]
    revision: int
    # How many keys are not names, and how many values cannot be read.
    odd_keys: int
    odd_values: int


class Store:
    """Access one cluster's part of etcd. Keys are relative to `/tailrace/<cluster>/`.

    Every method ends within seconds, whatever etcd does, and raises StoreUnavailable if no member answered.
    If a member fails or stalls, its requests are repeated at another one. A write may then be sent twice: it
    carries the revision at which its key was read, so that it is carried out once at most, and never late.
    """

    def __init__(self, client: EtcdClient, cluster: str) -> None:
        self._client = client
        self._prefix = f"/tailrace/{cluster}/"
        # Unreadable keys that were counted.
        self._unnamed: set[bytes] = set()
        self._before_close: list[Callable[[], Awaitable[None]]] = []

    @classmethod
    async def connect(cls, endpoints: Sequence[str], cluster: str, transport: Transport = PLAIN) -> Store:
        """Return a store once an etcd member has answered; wait up to 15 s for an etcd that is just starting.

        Raise StoreUnavailable, or ValueError if a name is not an endpoint or not a cluster name.
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
        """Run the actions of `before_close` concurrently, then close the connections."""
        await asyncio.gather(*(action() for action in list(self._before_close)), return_exceptions=True)
        await self._client.close()

    def before_close(self, action: Callable[[], Awaitable[None]]) -> None:
        """Register an action for `close` to await first. The action may call `forget_close`."""
        self._before_close.append(action)

    def forget_close(self, action: Callable[[], Awaitable[None]]) -> None:
        """Remove an action because it has run already. Actions that are not registered are ignored."""
        if action in self._before_close:
            self._before_close.remove(action)

    # ---- values

    async def get(self, key: str) -> bytes | None:
        """Return the value, or None if there is none."""
        present = await self._read(key)
        return None if present is None else present.value

    async def get_prefix(self, prefix: str) -> dict[str, bytes]:
        """Return all values whose keys begin with the prefix, by relative key, in key order."""
        try:
            values = (await self._client.list_prefix(self._key(prefix), f"list {prefix}")).values
        except Rejected as error:
            raise StoreUnavailable(f"etcd: list {prefix}: {error}") from error
        return self._by_name(values)

    async def put(self, key: str, value: bytes) -> int:
        """Set a value that stays until it is deleted; return the revision of the write."""
        return await self._write(key, [put_op(self._key(key), value)], f"put {key}", _any, _is_value(value))

    async def delete(self, key: str) -> int:
        """Delete a value; return the revision of the write, 0 if there was none."""
        return await self._write(
            key, [delete_op(self._key(key))], f"delete {key}", lambda present: present is not None, _deleted
        )

    async def compare_and_swap(self, key: str, expected: bytes | None, value: bytes) -> int:
        """Set a value if the current one is `expected` (None: there is none); return the revision of the
        write, 0 if it was another value.

        If a reply was lost, the write may also be that of another process that has set the same value; a
        caller that must tell these apart has to write values of its own. Raise StoreUnavailable also if a
        reply was lost and others have written since.
        """
        return await self._write(
            key,
            [put_op(self._key(key), value)],
            f"compare and swap {key}",
            _has_value(expected),
            _swapped(value),
        )

    async def compare_and_delete(self, key: str, expected: bytes) -> int:
        """Delete a value if it is `expected`; return the revision of the write, 0 if it was another. Raise as
        compare_and_swap does."""
        return await self._write(
            key, [delete_op(self._key(key))], f"compare and delete {key}", _has_value(expected), _deleted
        )

    async def compare_and_swap_all(self, swaps: Mapping[str, Swap]) -> frozenset[str]:
        """Carry out in one transaction those of at most SWAPS_MAX swaps, by key, that find the value which
        they expect; return their keys.

        What compare_and_swap says of lost replies holds for all of them together.
        """
        if not swaps:
            return frozenset()
        left, more = dict(swaps), len(swaps) - 1
        action = f"compare and swap {next(iter(swaps))}" + (f" and {more} more" if more else "")
        for _ in range(_ATTEMPTS):
            before = await self._read_all(left, action)
            left = {key: swap for key, swap in left.items() if _has_value(swap.expected)(before[key])}
            if not left:
                return frozenset()
            request = etcd_pb2.TxnRequest(
                compare=[unchanged(self._key(key), before[key]) for key in left],
                success=[
                    delete_op(self._key(key)) if swap.value is None else put_op(self._key(key), swap.value)
                    for key, swap in left.items()
                ],
                failure=[get_op(self._key(key)) for key in left],
            )
            answer = await self._call(TXN, request, action)
            if answer.reply.succeeded:
                return frozenset(left)
            if answer.attempts > 1:
                # All or none were carried out: what can be known of one is true of all.
                after = _found(answer.reply)
                known = [
                    _was_swapped(swap, before[key], present)
                    for (key, swap), present in zip(left.items(), after, strict=True)
                ]
                if all(known):
                    return frozenset(left)
                # A key that is absent again may have been put, and deleted by another writer.
                if False not in known or True in known:
                    raise _unknown(action)
        raise StoreUnavailable(f"etcd: {action}: others keep changing them")

    async def delete_orphaned(self, keys: Sequence[str], owner: str) -> bool:
        """Delete these values if there is none at `owner`; return whether there was none."""
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
        """Yield all values under the prefix by relative key: at once, then after each change, until closed.

        While etcd cannot be reached nothing is yielded. Once it is back (even with a compacted history, or
        without its data), everything is read again, so all that happened in the meantime appears as one
        change.
        """
        async with aclosing(self.watch_revisions(prefix)) as changes:
            async for snapshot in changes:
                yield snapshot.values

    async def watch_revisions(self, prefix: str) -> AsyncGenerator[Snapshot]:
        """Yield as `watch_prefix` does, each with a revision: what was written by then is in the values."""
        watch = PrefixWatch(self._client, self._key(prefix))
        async with aclosing(watch.values()) as changes:
            async for values, revision in changes:
                named = self._by_name(values)
                yield Snapshot(named, revision, len(values) - len(named), len(watch.skipped))

    async def watch_below(self) -> AsyncGenerator[dict[str, bytes]]:
        """Yield as `watch_prefix` does the values of all clusters that belong to this one, `CLUSTER.NAME`, by
        `NAME/key`."""
        watch = PrefixWatch(self._client, clusters_below(self._prefix).encode())
        async with aclosing(watch.values()) as changes:
            async for values, _ in changes:
                yield self._by_name(values)

    # ---- leases

    async def grant_lease(self, ttl_s: float) -> int:
        """Grant a lease of at least one second; return its id."""
        # Chosen here, so that a repeated request grants one lease. Not by `random`, which engines seed
        # identically in all workers.
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
        """Renew a lease to its full time; return False if it has expired."""
        try:
            return await self._client.keep_alive(lease) > 0
        except Rejected as error:
            if error.code is grpc.StatusCode.NOT_FOUND:
                return False
            raise StoreUnavailable(f"etcd: renew a lease: {error}") from error

    async def revoke_lease(self, lease: int) -> None:
        """Revoke a lease and delete the keys attached to it. An expired lease is ignored."""
        try:
            await self._client.call(LEASE_REVOKE, etcd_pb2.LeaseRevokeRequest(ID=lease), "revoke a lease")
        except Rejected as error:
            if error.code is not grpc.StatusCode.NOT_FOUND:
                raise StoreUnavailable(f"etcd: revoke a lease: {error}") from error

    async def get_leased(self, key: str) -> LeasedValue | None:
        """Return the value with its lease, or None if there is none."""
        return _leased_value(await self._read(key))

    async def put_leased(self, key: str, value: bytes, lease: int) -> None:
        """Set a value that is attached to the lease, and delete its tombstone. Raise LeaseExpired."""
        operations = [put_op(self._key(key), value, lease), delete_op(self._key(TOMBSTONES + key))]
        await self._write(key, operations, f"put {key}", _any, _is_leased(value, lease))

    async def create_leased(self, key: str, value: bytes, lease: int) -> bool:
        """Set a value that is attached to the lease, if there is none; return whether it is there now.

        Return True also if the value was there already, with this lease. Raise LeaseExpired.
        """
        return await self.swap_leased(key, None, value, lease)

    async def swap_leased(self, key: str, expected: LeasedValue | None, value: bytes, lease: int) -> bool:
        """Set a value that is attached to the lease, if the current one is `expected`; return whether it is
        there now.

        Raise LeaseExpired.
        """
        before = _has_leased_value(expected)
        operations = [put_op(self._key(key), value, lease)]
        if await self._write(key, operations, f"register {key}", before, _is_leased(value, lease)):
            return True
        return await self.get_leased(key) == LeasedValue(value, lease)

    async def withdraw(self, key: str, value: bytes, ttl_s: float) -> None:
        """Delete a registered value if it is `value`, and leave a tombstone for `ttl_s` seconds."""
        lease = await self.grant_lease(ttl_s)
        operations = [delete_op(self._key(key)), put_op(self._key(TOMBSTONES + key), value, lease)]
        await self._write(key, operations, f"withdraw {key}", _has_value(value), _deleted)

    # ---- internal

    def _key(self, relative: str) -> bytes:
        return (self._prefix + relative).encode()

    def _by_name(self, values: Mapping[bytes, bytes]) -> dict[str, bytes]:
        """Return values by relative key. Leave out keys that nothing here can have written."""
        named: dict[str, bytes] = {}
        for key, value in values.items():
            try:
                name = key.decode()[len(self._prefix) :]
            except UnicodeDecodeError:
                name = ""
            if name.isprintable() and 0 < len(name) <= LONGEST_KEY:
                named[name] = value
            elif key not in self._unnamed and len(self._unnamed) < _UNNAMED:
                self._unnamed.add(key)
                unreadable("key in etcd", repr(key), "it is not a short printable text")
        return named

    async def _read(self, key: str) -> _Present:
        request = etcd_pb2.RangeRequest(key=self._key(key))
        reply = (await self._call(RANGE, request, f"get {key}")).reply
        return reply.kvs[0] if reply.kvs else None

    async def _read_all(self, keys: Collection[str], action: str) -> dict[str, _Present]:
        """Return what is at at most SWAPS_MAX keys, read in one transaction."""
        request = etcd_pb2.TxnRequest(success=[get_op(self._key(key)) for key in keys])
        return dict(zip(keys, _found((await self._call(TXN, request, action)).reply), strict=True))

    async def _write(
        self,
        key: str,
        operations: Sequence[etcd_pb2.RequestOp],
        action: str,
        accept: Callable[[_Present], bool],
        was_carried_out: Callable[[_Present, _Present], bool | None],
    ) -> int:
        """Carry out the operations once if `accept` accepts what is at the key; return the revision, 0 if it
        did not.

        They are conditional on the revision at which the key was read, and change it. So a request that was
        sent several times is carried out once at most, and one that arrives late does nothing. If an attempt
        seemed lost and the key has changed, `was_carried_out(before, after)` says whether that was this
        write; None: it cannot be known any more. Then raise StoreUnavailable. `action` names the write in
        errors.
        """
        name = self._key(key)
        for _ in range(_ATTEMPTS):
            before = await self._read(key)
            if not accept(before):
                return 0
            request = etcd_pb2.TxnRequest(
                compare=[unchanged(name, before)], success=operations, failure=[get_op(name)]
            )
            answer = await self._call(TXN, request, action)
            if answer.reply.succeeded:
                return answer.reply.header.revision
            if answer.attempts > 1:
                (after,) = _found(answer.reply)
                carried_out = was_carried_out(before, after)
                if carried_out:
                    return answer.reply.header.revision if after is None else after.mod_revision
                if carried_out is None:
                    raise _unknown(action)
        raise StoreUnavailable(f"etcd: {action}: others keep changing it")

    async def _call(self, method: Method[Request, Reply], request: Request, action: str) -> EtcdReply[Reply]:
        try:
            return await self._client.call(method, request, action)
        except Rejected as error:
            # Of all that these requests name, only a lease can be missing.
            kind = LeaseExpired if error.code is grpc.StatusCode.NOT_FOUND else StoreUnavailable
            raise kind(f"etcd: {action}: {error}") from error


def _found(reply: etcd_pb2.TxnResponse) -> list[_Present]:
    """Return what a transaction of reads, each of one key, has found."""
    ranges = [response.response_range.kvs for response in reply.responses]
    return [kvs[0] if kvs else None for kvs in ranges]


def _unknown(action: str) -> StoreUnavailable:
    return StoreUnavailable(f"etcd: {action}: it is unknown whether it was done; the key has changed since")


# Conditions on what is at a key before a write.


def _any(present: _Present) -> bool:
    return True


def _has_value(expected: bytes | None) -> Callable[[_Present], bool]:
    return lambda present: (None if present is None else present.value) == expected


def _has_leased_value(expected: LeasedValue | None) -> Callable[[_Present], bool]:
    return lambda present: _leased_value(present) == expected


def _leased_value(present: _Present) -> LeasedValue | None:
    return None if present is None else LeasedValue(present.value, present.lease)


# Judge, after a write with a lost attempt, whether what is at the key is the result of that attempt.


def _is_value(value: bytes) -> Callable[[_Present, _Present], bool]:
    """Judge a write that may be repeated until its value is there."""
    return lambda before, after: after is not None and after.value == value


def _is_leased(value: bytes, lease: int) -> Callable[[_Present, _Present], bool]:
    """Judge a write by its lease, which no other process knows."""
    return lambda before, after: after is not None and (after.value, after.lease) == (value, lease)


def _swapped(value: bytes) -> Callable[[_Present, _Present], bool | None]:
    def was_carried_out(before: _Present, after: _Present) -> bool | None:
        if after is None or after.version != (1 if before is None else before.version + 1):
            return None
        if before is None:
            # A key that was created, deleted and created again looks the same.
            return True if after.value == value else None
        return after.value == value if before.create_revision == after.create_revision else None

    return was_carried_out


def _was_swapped(swap: Swap, before: _Present, after: _Present) -> bool | None:
    """Judge one of several swaps, whose key may also be unchanged."""
    if (before and before.mod_revision) == (after and after.mod_revision):
        return False
    return _deleted(before, after) if swap.value is None else _swapped(swap.value)(before, after)


def _deleted(before: _Present, after: _Present) -> bool | None:
    if after is None:
        return True
    # Written again after it was deleted; it is unknown who deleted it.
    return False if before is not None and before.create_revision == after.create_revision else None
